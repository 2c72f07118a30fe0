"""What lets the Hub and `AutoModel` load a saved model through this package."""

#: written beside saved models, so that the Hub's remote code finds this package
REMOTE_FILE = "modeling_grape.py"
REMOTE_CODE = '''"""Loads this model through the grape-pe package: pip install 'grape-pe[hf]'."""

try:
    from grape_pe.hf import *
except ImportError as error:
    raise ImportError("this model needs grape-pe; install it with: pip install 'grape-pe[hf]'") from error
'''


def auto_map(family: str = "Grape") -> dict[str, str]:
    """Which class of `REMOTE_FILE` each Auto class uses, for models named `family`ForCausalLM and so on."""
    classes = {"AutoConfig": "Config", "AutoModel": "Model", "AutoModelForCausalLM": "ForCausalLM"}
    return {auto: f"modeling_grape.{family}{name}" for auto, name in classes.items()}
