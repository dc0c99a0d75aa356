"""Blind test of `dlscale predict --model`: predictions were committed before the measured figures were looked up."""
