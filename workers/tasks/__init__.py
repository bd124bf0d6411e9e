"""What the scheduler runs: turns, opens, forks, replays."""
