"""The version of fa3verify, which rooms read here: the package itself knows them all."""

__version__ = "0.3.0"
