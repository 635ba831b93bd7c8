#include "cuda/forward.h"

namespace fewbit::cuda {

template void launch_forward<Float16>(const ForwardArguments&, const Thresholds&);

}  // namespace fewbit::cuda
