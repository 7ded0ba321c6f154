"""How far apart two models or two sets of pictures are, with error bars."""
