#include "bindings/entry.h"

namespace fewbit::bindings {

namespace {

void check_function(int function) {
  const int count = static_cast<int>(fused_functions().size());
  if (function < 0 || function >= count) {
    refuse("function", "a number below " + std::to_string(count), std::to_string(function));
  }
}

}  // namespace

CopyShape copy_shape(int64_t samples, int64_t features, int group_size, int bits, int kind) {
  if (samples < 0) refuse("samples", "0 or more", std::to_string(samples));
  if (features < 0) refuse("features", "0 or more", std::to_string(features));
  if (features > 0 && samples > INT64_MAX / 16 / features) {
    refuse("samples", "a number of elements that can be counted",
           std::to_string(samples) + " samples of " + std::to_string(features));
  }
  if (group_size < kBlock || group_size > kMostGroupSize || group_size % kBlock != 0) {
    refuse("group_size", "a multiple of 32 from 32 to 65536", std::to_string(group_size));
  }
  if (kind < 0 || kind > 2) {
    refuse("kind", "0 (uniform), 1 (rotated) or 2 (masked)", std::to_string(kind));
  }
  if (kind != 0 && group_size > kFullGroup) {
    refuse("group_size", "at most 256 unless the copy is uniform", std::to_string(group_size));
  }
  check_bits(bits);
  return {samples, features, group_size, bits, static_cast<CopyKind>(kind)};
}

Copy copy_at(const Entry& entry, const Buffer& packed, const Buffer& ranges, const Streams& streams, bool is_mixed,
             bool is_rotated) {
  const int seed_rows = fewbit::seed_rows(is_rotated);
  const int64_t limits = (streams.groups + seed_rows) * kColumns;
  if (!is_mixed) {
    return {entry.exactly<uint32_t>("packed", packed, streams.words, kInt32),
            entry.exactly<uint16_t>("ranges", ranges, limits, static_cast<int>(DType::bfloat16)), streams.words, streams.groups};
  }
  if (ranges.count % kColumns) entry.wrong("ranges", std::to_string(kColumns) + " columns", Entry::described(ranges));
  return {entry.at_least<uint32_t>("packed", packed, streams.words, kInt32),
          entry.at_least<uint16_t>("ranges", ranges, limits, static_cast<int>(DType::bfloat16)), packed.count,
          ranges.count / kColumns - seed_rows};
}

Codes codes_at(const Entry& entry, const Buffer& codes, const Buffer& packed, int bits) {
  check_size(codes.count);
  check_bits(bits);
  auto* at = entry.exactly<uint8_t>("codes", codes, codes.count, kUint8);
  return {codes.count, at, entry.packed("packed", packed, codes.count, bits)};
}

SharedBits shared_bits(const Entry& entry, const Buffer& squares, int64_t extra, const std::vector<float>& gains, const Buffer& widths) {
  const int64_t samples = widths.count;
  const auto levels = static_cast<int64_t>(gains.size());
  if (levels != kMaxBits - 1) refuse("gains", "7 numbers", std::to_string(levels));
  if (extra < 0 || extra > samples * levels) refuse("extra", "a number of bits from 0 to 7 a sample", std::to_string(extra));
  return {entry.exactly<const float>("squares", squares, samples, 0), samples, entry.exactly<uint8_t>("widths", widths, samples, kUint8)};
}

Seeds seeds_at(const Entry& entry, const Buffer& counter, const Buffer& out) {
  return {entry.exactly<int64_t>("counter", counter, 1, kInt64), out.count, entry.exactly<int64_t>("out", out, out.count, kInt64)};
}

Elements encoded(const Entry& entry, const OwnedTable& table, const Buffer& x, const Buffer& packed, const SeedArgument& seed) {
  const DType dtype = entry.floating("x", x);
  const auto* from = entry.exactly<const void>("x", x, x.count, x.item);
  auto* to = entry.packed("packed", packed, x.count, table.get().bits);
  return {dtype, x.count, from, nullptr, to, entry.seed(table, seed)};
}

Elements multiplied(const Entry& entry, const OwnedTable& table, const Buffer& grad, const Buffer& packed, const Buffer& out) {
  const DType dtype = entry.floating("out", out);
  auto* to = entry.exactly<void>("out", out, out.count, out.item);
  const auto* from = entry.exactly<const void>("grad", grad, grad.count == 1 ? 1 : out.count, out.item);
  auto* codes = entry.packed("packed", packed, out.count, table.get().bits);
  return {dtype, out.count, from, to, codes, nullptr};
}

Elements activated(const Entry& entry, int function, const OwnedTable& table, const Buffer& x, const Buffer& y,
                   const Buffer& packed, const SeedArgument& seed, const char* name) {
  check_function(function);
  const DType dtype = entry.narrow("x", x);
  const auto* from = entry.exactly<const void>("x", x, x.count, x.item);
  auto* to = entry.exactly<void>("y", y, x.count, x.item);
  auto* codes = entry.packed(name, packed, x.count, table.get().bits);
  return {dtype, x.count, from, to, codes, entry.seed(table, seed)};
}

ChannelEstimate channel_estimate(const Entry& entry, const Buffer& x, const Buffer& out, const Buffer& mean, const Buffer& rstd,
                                 int64_t inner) {
  const DType dtype = entry.narrow("x", x);
  const auto* from = entry.exactly<const void>("x", x, x.count, x.item);
  const auto normalization = entry.normalization(mean, rstd, inner, x.count);
  const int64_t channels = out.count / 2;
  auto* to = entry.exactly<uint16_t>("out", out, 2 * channels, static_cast<int>(DType::bfloat16));
  entry.index("out", channels, 1, x.count);
  if (x.count == 0) entry.wrong("x", "1 element or more", "0");
  return {from, dtype, normalization, x.count / channels, channels, to};
}

DType numbers_of(const Entry& entry, const char* name, const Buffer& buffer, const CopyShape& shape) {
  const DType dtype = entry.narrow(name, buffer);
  entry.exactly<void>(name, buffer, shape.elements(), buffer.item);
  return dtype;
}

void check_fixed(const Entry& entry, const Buffer& gamma, const Buffer& beta, int bits, const Buffer& grid) {
  check_size(gamma.count);
  check_bits(bits);
  entry.exactly<float>("gamma", gamma, gamma.count, 0);
  entry.exactly<float>("beta", beta, gamma.count, 0);
  entry.exactly<float>("grid", grid, gamma.count * kGridRows, 0);
}

}  // namespace fewbit::bindings
