#include "cuda/forward.h"

namespace fewbit::cuda {

template void launch_forward<float>(const ForwardArguments&, const Thresholds&);

}  // namespace fewbit::cuda
