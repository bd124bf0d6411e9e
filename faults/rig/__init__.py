"""The machinery under a set-up: processes, proxies, disks, clocks and simulated drives."""
