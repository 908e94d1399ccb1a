"""What the ledger's tests share."""

import sys
from pathlib import Path

# `synthetic_tapes` beside this file is a module of several test files, and of nobody else.
sys.path.insert(0, str(Path(__file__).parent))
