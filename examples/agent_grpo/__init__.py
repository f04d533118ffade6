"""An agent with a calculator that learns by GRPO from what the server remembers of its sessions."""
