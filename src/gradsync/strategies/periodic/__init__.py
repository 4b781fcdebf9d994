"""Strategies that exchange weights every n-th step: local SGD and DiLoCo."""
