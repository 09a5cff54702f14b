# SPDX-License-Identifier: Apache-2.0
"""The straggler engine from Python: judge step times, record them, replay a recording.

    engine = Engine(ranks=8)
    engine.step(number, seconds)          # one float per rank, in rank order (kinds * ranks values with several kinds)
    for event in engine.events(): ...

The engine is C (include/gpubridge/straggler.h); docs/straggler-engine.md says what it computes.
"""

from gpubridge.straggler._engine import Answer, Engine, Event, Recorder, Report, Rule, State, replay

__all__ = ["Answer", "Engine", "Event", "Recorder", "Report", "Rule", "State", "replay"]
