"""Training from a folder of artifacts on the stock runtime: the model's code is not needed."""

from graphgen.train.back import to_checkpoint
from graphgen.train.resume import Change
from graphgen.train.session import TrainingSession
from graphgen.train.trainer import Trainer

__all__ = ["Change", "Trainer", "TrainingSession", "to_checkpoint"]
