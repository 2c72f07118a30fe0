"""`grape adapt`: give a pretrained model another encoding, train it, and measure it before, during and after."""
