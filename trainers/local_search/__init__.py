"""A client's own search before the vote (DP-HYPE): many candidate settings trained at once on its records.

| file         | what                                                                                     |
|--------------|------------------------------------------------------------------------------------------|
| `settings`   | a candidate's settings, how it is judged, when it is stopped early                         |
| `split`      | hold-out and folds                                                                       |
| `stacked`    | what a stack of models is, loss and accuracy of all of them                              |
| `mlp`        | linear heads and multi-layer perceptrons, kernels by hand                                |
| `module`     | any torch module, by `torch.func`                                                        |
| `descent`    | SGD with momentum and StepLR over a stack                                                |
| `task`       | the `ClientTask`                                                                         |

Names are imported when they are first used: the package is quick to import and loads no torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
