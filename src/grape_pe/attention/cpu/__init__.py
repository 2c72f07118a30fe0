"""The compiled CPU kernel: `build` compiles and loads it."""
