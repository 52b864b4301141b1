"""Measured runs, published or the user's own, and how far the cost model is from them."""
