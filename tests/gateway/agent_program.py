"""A program that asks the model a few times and pays by what it said; its first argument says how it misbehaves."""

import json
import os
import subprocess
import sys
import time

from agent_functions import ask

task = json.loads(sys.stdin.readline())
fault = sys.argv[1] if len(sys.argv) > 1 else ""
said, messages = [], []
for turn in range(3):
    messages.append({"role": "user", "content": f"{task.get('task', 'go')} {turn}"})
    said.append(ask(os.environ["OPENAI_BASE_URL"], messages))
    messages.append({"role": "assistant", "content": said[-1]})
    if fault == "dies" and turn == 1:
        os.kill(os.getpid(), 9)
    if fault == "hangs":
        time.sleep(1000)
if fault == "leaves":  # a process of its own session, which keeps the output open
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(12)"], start_new_session=True)
if fault == "loud":
    sys.stdout.write("\n" + "x" * 3_000_000)
if fault == "memory":
    block = bytearray(1 << 30)
sys.stdout.write(
    "\n" + "nonsense"
    if fault == "nonsense"
    else json.dumps({"reward": sum("a" in text for text in said) / 3})
)
