#include "cuda/forward.h"

namespace fewbit::cuda {

template void launch_forward<Bfloat16>(const ForwardArguments&, const Thresholds&);

}  // namespace fewbit::cuda
