"""Modules by the names that PaddlePaddle/FastDeploy gives them."""
