"""Differentially private training on a learned support, for any LightningModule.

>>> from tptopk_pl import TwoPhaseSupportCallback
>>> callback = TwoPhaseSupportCallback(
...     target_epsilon=3.0, target_delta=1e-5, expected_batch_size=512, max_grad_norm=0.1
... )
>>> callback.plan, callback.epsilon, callback.support
(None, 0.0, None)
"""

from tptopk_pl.callback import TwoPhaseSupportCallback
from tptopk_pl.plan import TwoPhasePlan
from tptopk_pl.support import Support

__version__ = "0.1.0"

__all__ = ["Support", "TwoPhasePlan", "TwoPhaseSupportCallback"]
