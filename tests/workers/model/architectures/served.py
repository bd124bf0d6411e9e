"""All model types whose answers are proven, by name."""

from tests.workers.model.architectures.full_attention import DENSE, MIXTURES
from tests.workers.model.architectures.latent import LATENTS
from tests.workers.model.architectures.recurrent import RECURRENT
from tests.workers.model.architectures.windows import WINDOWED
from tests.workers.model.architectures.wrappers import WRAPPERS

SERVED = DENSE | MIXTURES | WINDOWED | LATENTS | RECURRENT | WRAPPERS
