"""A number game: guess the secret number; each wrong guess is answered with "higher" or "lower".

    --environment docs/environments/guess_number.py:GuessNumber --max_turns 4

The answer of a row is the secret number.
"""


class GuessNumber:
    def __init__(self, row):  # a new object for each episode, with the columns of the data row
        self.secret, self.is_won = int(row["answer"]), False

    def reply(self, completion):  # to the text of a turn
        words = completion.split()
        if not words or not words[-1].isdecimal():
            return "a number, please"
        guess = int(words[-1])
        self.is_won = guess == self.secret
        if self.is_won:
            return None  # the episode is over
        return "higher" if guess < self.secret else "lower"  # the next turn of the user

    def reward(self):  # self.turns: how many there were
        return {"reward": float(self.is_won), "guesses": self.turns}
