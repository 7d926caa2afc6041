"""The final answer of a completion: `read_answer`. The last mark counts, whatever stands around it."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[^\s{}$\\.,]+)")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # or an escaped character, which is none
STATED = re.compile(
    r"(?i)(?:\banswer\b[*_]*\s*(?:\bis\b|[:：])|答案[*_]*(?:就|即|应该?)?(?:[是为為](?!否|何|什么|多少)|[选選:：】])"
    r"|(?:故|所以|因此)[选選](?![项項取用])[择擇]?)[*_]*[ \t]*[:：]?\s*"
)
HEADING = re.compile(  # a line with #, with a capital F, or with these words alone; it may be underlined
    r"(?im)^(?:[ \t>*_]*(?:#[^\n]*|(?:the )?)|[^\n]*(?<![A-Za-z])(?=(?-i:F)))(?:final answer|(?:最终)?答案)"
    r"[ \t:：*_]*$(?:\n[-=]{3,}[ \t]*$)?"
)
SENTENCE_END = r"(?:(?<!\be\.g)(?<!\bi\.e)[.!?．](?=[\s*\"')]|$)|[。！？\n]|[,;]?\s+(?:because|since)\s|[，,]?\s*因为)"
# Up to the end of the sentence, which does not lie in a formula
SENTENCE = re.compile(rf"(?i)(?:\$\$.*?\$\$|\$[^$]*\$|\\\[.*?\\\]|\\\(.*?\\\)|(?!{SENTENCE_END}).)*", re.DOTALL)
MARKUP = re.compile(  # a formula, where * and _ are signs; `code`; **emphasis**, which is no product and no index
    r"\$(?:(?!\*\*)[^$\n])*\$|\\\((?:(?!\\\().)*?\\\)|\\\[(?:(?!\\\[).)*?\\\]"
    r"|(?<!`)(?P<tick>`{1,3})(?!`)(?P<code>[^`\n]+)(?P=tick)(?!`)"
    r"|(?<![0-9A-Za-z\\^{})\]!|*_])(?P<mark>(?P<sign>[*_])(?P=sign){0,2})(?!(?P=sign)|[\s{])"
    r"(?P<text>(?:(?!(?P=mark)).)+)(?<!\s)(?P=mark)(?!(?P=sign)|[0-9{\\]|(?<!\*\*)[A-Za-z])"
)
WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
MAX_STATED = 1000  # characters behind a mark without an end


def opens_thought(prompt: str) -> bool:
    return prompt.rstrip().endswith("<think>")


def visible_text(completion: str, prompt: str = "") -> str | None:
    """The text after the last `</think>`, if there is one; None if the completion ended while it was thinking."""
    _, end, text = completion.rpartition("</think>")
    is_thinking = "<think>" in text or (not end and opens_thought(prompt))
    return None if is_thinking else text


def plain(text: str) -> str:
    """The text without the marks of emphasis and code, and without what a cut has left of them; x^* stays."""
    text = MARKUP.sub(lambda match: match["code"] or (plain(match["text"]) if match["text"] else match[0]), text)
    end = len(text.rstrip(" *_"))
    return re.sub(r"^[ *_]+(?!\{)", "", text[: end + (text[end - 1 : end] == "^")])


def read_answer(completion: str, prompt: str = "", unmarked: str = "value") -> str | None:
    """The final answer by the rules 1 to 5 of docs/rewards.md, "What counts as the answer"; None if there is none.

    `prompt`: as the model saw it. `unmarked`: rule 4 outside `<answer>` holds for a "value" (one line of at most two
    words), for "none", or for "all" texts, which keep their emphasis.
    """
    text = visible_text(completion, prompt)
    if text is None:
        return None
    _, tag, tagged = text.rpartition("<answer>")
    if tag:
        text, end, _ = tagged.partition("</answer>")
        if not end:
            return None
    if (box := last_box(text)) is not None:  # rule 1
        return box.strip() or None
    text = (text if unmarked == "all" else plain(text)).strip()
    answer = _marked(text)  # rules 2 and 3
    if answer is None:
        is_value = "\n" not in text[:MAX_STATED] and len(text) <= MAX_STATED and len(WORD.findall(text)) <= 2
        answer = text if tag or unmarked == "all" or (unmarked == "value" and is_value) else ""
    return (answer if unmarked == "all" else plain(answer)).strip() or None


def _marked(text: str) -> str | None:
    """The content of the last mark of a text without boxes; None without a mark."""
    if headings := list(HEADING.finditer(text)):
        text = f"answer: {text[headings[-1].end() :]}"
    _, mark, behind = text.rpartition("####")
    if mark:
        return behind[:MAX_STATED].strip().partition("\n")[0]
    if stated := list(STATED.finditer(text)):
        return SENTENCE.match(text[stated[-1].end() :][:MAX_STATED])[0]
    return None


def last_box(text: str) -> str | None:
    """The content of the last outermost \\boxed{...} or \\fbox{...}; of `\\boxed 5`, without braces, the next word."""
    at, content = 0, None
    while match := BOX.search(text, at):
        at, content = match.end(), match[1]
        if content == "{":
            at, content, depth = len(text), "", 1  # for a box that is not closed
            for brace in BRACE.finditer(text, match.end()):
                depth += (brace[0] == "{") - (brace[0] == "}")
                if depth == 0:
                    at, content = brace.end(), text[match.end() : brace.start()]
                    break
    return content
