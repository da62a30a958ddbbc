"""Imported first, it finds the block without its top, which loads torch.

A process starts fast without, and forks of it are quick.
"""

import sys
from pathlib import Path
from types import ModuleType

import primeblocks

package = ModuleType("primeblocks.async_loop")
package.__path__ = [str(Path(primeblocks.__file__).parent / "async_loop")]
sys.modules[package.__name__] = package
