"""An environment with reset() and step(action), as Gymnasium, OpenEnv, SkyRL-gym or verifiers have them, as ours.

--environment docs/environments/gym_adapter.py:Adapter --max_turns 8
"""


class Corridor:  # stands for yours: two steps to the right
    def reset(self, seed=None):
        self.place = 0
        return "you are at 0", {}

    def step(self, action):
        self.place += {"right": 1, "left": -1}.get(action.strip(), 0)
        return f"you are at {self.place}", float(self.place == 2), self.place == 2, False, {}


class Adapter:
    def __init__(self, row):
        self.gym, self.rewards = Corridor(), []
        self.gym.reset(seed=int(row.get("seed", 0)))  # what it says first is the prompt of the data row

    def reply(self, completion):
        observation, reward, terminated, truncated, _ = self.gym.step(completion)
        self.rewards.append(float(reward))
        return None if terminated or truncated else str(observation)

    def reward(self):  # one number a turn, for --advantage mt_grpo; sum(self.rewards) is one for the whole
        return self.rewards
