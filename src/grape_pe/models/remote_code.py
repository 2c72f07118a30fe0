"""What lets the Hub and `AutoModel` load a saved model through this package."""

#: written beside saved models, so that the Hub's remote code finds this package
REMOTE_FILE = "modeling_grape.py"
REMOTE_CODE = '''"""Loads this model through the grape-pe package: pip install 'grape-pe[hf]'."""

try:
    from grape_pe.hf import GrapeConfig, GrapeForCausalLM, GrapeModel
except ImportError as error:
    raise ImportError("this model needs grape-pe; install it with: pip install 'grape-pe[hf]'") from error

__all__ = ["GrapeConfig", "GrapeForCausalLM", "GrapeModel"]
'''
AUTO_MAP = {
    "AutoConfig": "modeling_grape.GrapeConfig",
    "AutoModel": "modeling_grape.GrapeModel",
    "AutoModelForCausalLM": "modeling_grape.GrapeForCausalLM",
}
