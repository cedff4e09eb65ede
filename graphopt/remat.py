"""Rematerialization at run time: values that autograd saved are dropped and computed again."""
