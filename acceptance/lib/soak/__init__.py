"""The soak: a server, its clients and its trainer under pauses, updates and kills, and checks that nothing is lost."""
