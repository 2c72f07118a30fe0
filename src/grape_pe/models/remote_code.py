"""The remote-code file of saved models, through which `AutoModel` loads them with this package."""

#: written beside saved models
REMOTE_FILE = "modeling_grape.py"
REMOTE_CODE = '''"""Loads this model through the grape-pe package: pip install 'grape-pe[hf]'."""

try:
    from grape_pe.hf import *
except ImportError as error:
    raise ImportError("this model needs grape-pe; install it with: pip install 'grape-pe[hf]'") from error
'''


def auto_map(family: str = "Grape") -> dict[str, str]:
    """The `auto_map` of a configuration, for a model class named `family`ForCausalLM."""
    classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    return {auto: f"modeling_grape.{family}{name}" for auto, name in classes.items()}
