import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the doubles, for every test of this folder
