"""Functions with torch.nn.functional's signatures that save fewer bytes for the backward pass.

Each file has the functions for one kind of layer and their autograd Functions; the modules are in `fewbit.nn`.
"""

from types import FunctionType

from fewbit.functional.activations import *  # noqa: F403
from fewbit.functional.attention.attention import *  # noqa: F403
from fewbit.functional.batch_norm import *  # noqa: F403
from fewbit.functional.convolution import *  # noqa: F403
from fewbit.functional.dropout import *  # noqa: F403
from fewbit.functional.embedding import *  # noqa: F403
from fewbit.functional.layer_norm import *  # noqa: F403
from fewbit.functional.linear import *  # noqa: F403
from fewbit.functional.losses import *  # noqa: F403
from fewbit.functional.pooling import *  # noqa: F403
from fewbit.functional.prelu import *  # noqa: F403
from fewbit.functional.products import *  # noqa: F403
from fewbit.functional.resize import *  # noqa: F403
from fewbit.functional.softmax import *  # noqa: F403

__all__ = [name for name, value in list(globals().items()) if isinstance(value, FunctionType)]
