"""Ranks in processes of their own, on one machine or several."""
