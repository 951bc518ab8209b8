"""Drafters, one a file: who proposes the tokens that the model then verifies, several in one step."""
