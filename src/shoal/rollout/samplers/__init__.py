"""The name that `shoal.samplers` had before: programs that import these modules by it get the same ones."""

import sys
from importlib import import_module

for _name in ("sampler", "scripted", "tokenizers"):
    sys.modules[f"{__name__}.{_name}"] = import_module(f"shoal.samplers.{_name}")
