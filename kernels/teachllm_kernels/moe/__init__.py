"""Mixture of experts: routing tokens to experts, and the products of all experts in one launch."""
