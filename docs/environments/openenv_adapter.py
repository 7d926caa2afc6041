"""An environment behind an OpenEnv server: --environment docs/environments/openenv_adapter.py:OpenEnv --max_turns 8

    pip install openenv-core
    OPENENV_URL=http://host:8000 OPENENV_ACTION=message OPENENV_OBSERVATION=echoed_message ...

An episode is a session of the server. The text of a turn is one field of the action, OPENENV_ACTION, and one field of
the observation, OPENENV_OBSERVATION, is the reply to it. What reset() shows belongs into the prompt of the data row;
its column `seed`, if there is one, is the seed.
"""

import os

from openenv.core import GenericEnvClient


class OpenEnv:
    def __init__(self, row):
        self.rewards, self.client = [], GenericEnvClient(base_url=os.environ["OPENENV_URL"]).sync()
        self.client.reset(**{name: int(row[name]) for name in ["seed"] if name in row})

    def reply(self, completion):
        result = self.client.step({os.environ["OPENENV_ACTION"]: completion})
        self.rewards.append(float(result.reward or 0.0))
        return None if result.done else str(result.observation[os.environ["OPENENV_OBSERVATION"]])

    def reward(self):  # called once, at the end; one number a turn, as --advantage mt_grpo wants them
        self.client.close()
        return self.rewards
