from evals.suites.multiturn.examples import Dialogue, Size
def build(seed, size, data): raise NotImplementedError
