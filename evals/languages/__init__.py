"""Languages of cases: what conversations, facts and questions are written in."""
