"""A task of reasoning_gym, with its own verifier: --reward docs/rewards/reasoning_gym_task.py:score

pip install reasoning_gym
python docs/rewards/reasoning_gym_task.py leg_counting 1000 > legs.jsonl      # for --train_data
"""

import json
import sys

import reasoning_gym


def score(completion, columns, prompt):
    """The task's own score, from 0 to 1, of the final answer."""
    from grading.answer import read_answer  # here: where the data is made, the repository is not on the path

    entry = columns["entry"]
    entry = json.loads(entry) if isinstance(entry, str) else entry
    verifier = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
    return verifier(read_answer(completion, prompt, unmarked="all"), entry)


if __name__ == "__main__":
    task, size = sys.argv[1], int(sys.argv[2])
    for entry in reasoning_gym.create_dataset(task, size=size, seed=0):
        row = {"problem": entry["question"], "answer": entry["answer"], "entry": json.dumps(entry)}
        print(json.dumps(row))
