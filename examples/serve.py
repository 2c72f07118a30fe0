"""`transformers serve` for models of this package: pip install 'grape-pe[hf]' 'transformers[serving]'.

    python examples/serve.py adapted/final --port 8000

transformers serve looks for the class of a model in transformers itself, so it has to be put there first. All options
are those of transformers serve.
"""

import sys

from transformers.cli.serving import model_manager
from transformers.cli.transformers import main

import grape_pe.hf

for name in grape_pe.hf.__all__:
    if name.endswith("ForCausalLM"):
        setattr(model_manager.transformers, name, getattr(grape_pe.hf, name))

if __name__ == "__main__":
    sys.argv.insert(1, "serve")
    main()
