"""Tutorial: a vision transformer predicts the weather (SC23 to SC25)."""
