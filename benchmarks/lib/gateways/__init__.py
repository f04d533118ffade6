"""Parts of benchmarks/gateway.py: replicas whose tokens tell when they were made, and gateways before them."""
