# SPDX-License-Identifier: Apache-2.0
"""A second implementation of docs/straggler-engine.md in plain Python floats, and the programs that compare it."""
