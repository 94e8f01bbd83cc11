from .mlp import StackedMLP as StackedMLP
from .module import StackedModule as StackedModule
from .settings import EarlyStopping as EarlyStopping
from .settings import LocalTraining as LocalTraining
from .settings import Validation as Validation
from .stacked import StackedModel as StackedModel
from .task import LocalSearchTask as LocalSearchTask
