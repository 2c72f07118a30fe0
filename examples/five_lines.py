"""Use an encoding in your own attention: build it, call it on q and k, attend with its bias."""

import torch

import grape_pe as grape

B, H, T, D, C = 2, 8, 128, 64, 512
x = torch.randn(B, T, C)
q, k, v = (torch.randn(B, H, T, D, requires_grad=True) for _ in range(3))

enc = grape.build("grape-ap", heads=H, head_dim=D, width=C)  # or "rope", "fox", "grape-m+grape-a-qk", …
code = enc(q, k, x=x)
y = grape.attend(code.q, code.k, v, bias=code.bias)

y.square().mean().backward()
print(f"{enc!r}\n  q {tuple(q.shape)} -> y {tuple(y.shape)}, bias {type(code.bias).__name__}")
