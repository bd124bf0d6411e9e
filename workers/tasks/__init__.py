"""Jobs of the scheduler: turns, opens, forks, replays."""
