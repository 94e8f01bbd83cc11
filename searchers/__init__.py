"""Private hyperparameter searches for Ray Tune.

Names are imported when they are first used, so that importing the package is quick and never loads torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
