"""Which part of a completion is its final answer: `read_answer` (mathematics) and `read_final_answer` (plain text).

Read `read_answer` first. An answer is in a tag or a box, is stated in words (`STATED`), or is the value of the last
sentence that has one (`_value`). In each case `_unless_retracted` reads what is said behind it.
"""

from __future__ import annotations

import itertools
import re

Span = tuple[int, int, str | None]  # start, end, inside (None: never closed)

MAX_UNMARKED = 5000  # characters at the end of a text in which an answer without tag or box is looked for
MAX_AFTER = 1000  # characters behind an answer in which it may be taken back


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE | re.MULTILINE)


# How an answer is stated ----------------------------------------------------------------------------------------------

CHOICE = r"(?-i:\(?\b[A-HJ]\b\)?)(?![.,]?\w|['’]|\s*[=+*/^<>]| (?!and|or|because|since|as|is|for|due)[a-z])"
CHOICES = rf"{CHOICE}(?:(?:\s*[,/&、]\s*|,? (?:and|or) ){CHOICE})*"
NUMBER = (  # with a percent sign or a unit that changes it
    r"(?<![A-Za-z0-9_.])[-−]?\\?[$¥€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|:\d\d(?: ?[ap]m\b)?)?"
    r"(?:\s?\\?%|\s?(?:[ckm]?m[²³]|[ckm]m|k?g|km/h|mph|(?:平方)?(?:厘米|千米|毫米|米)|千克|公斤|小时|分钟)(?:/(?:小时|秒))?(?!\w))?(?![A-Za-z0-9_])"
)
VALUE = rf"(?:[-−+(\[{{\s]*\\?[$¥€£]?[-−]?\.?\d|\$|\\[A-Za-z{{(]|√|{CHOICE}\W*$)"  # its beginning
IS = (
    r"(?:(?:is|are|was|equals?|becomes?|(?:would|should|must|will|has to|(?:turns?|comes?) out to) be|comes? (?:out )?to)"
    r"\b(?: (?:therefore|thus|then|hence|just|indeed|actually|really|clearly|exactly|now|still|for sure)\b,?)*)"
)
STATED = _any(  # what follows, or stands in a group, is the answer
    rf"\b(?:answers?|ans)\b\.?(?: (?:to|for|of|in|here|choice|that|which|we)\b[^.:=\n]{{0,60}}?)?,? ?(?:{IS} ?:?|[:=：])",
    r"^\W*(?:(?:the )?final )?answer\b *(?:\n|(?=[-(\d$\\]))",
    rf"\b(?:correct|right|best|final) (?:option|choice|one|result|value)s? {IS} ?:?",
    rf"\b(?:choose|select|pick|finalize|go(?:ing)? with|went with) (?:(?:option|choice|answer) )?(?P<chosen>{CHOICES})",
    rf"\b(?P<right>{CHOICES}) (?:is|are|must be) (?:the |our |my |clearly )*(?:(?!not)\w+ )?(?:correct|right|answer)\b",
    r"(?P<before>\$[^$\n]{1,80}\$|(?<![\w.,])[-−]?\d[\d,./]*%?) (?:is|are) (?:the|our|my) (?:\w+ )?answer\b",
    r"(?-i:(?P<item>[A-HJ])选?项?是?正确)",
    r"(?<![不没])选(?:择|项)?[:：]?\s?(?=[（(]?[A-HJ])",
    r"(?:答案?|正确选项)[】\]]?\s?(?:应?该?[是为為]|[:：])[:：]?|【答案】|####",
)
HAS_VALUE = _any(r"\d|\$|\\[A-Za-z]|[π√∞]", rf"^\W*{CHOICE}")
NO_VALUE = _any(r"(?:in|as|above|below|given|unique|verified|consistent|reasonable|(?:indeed )?(?:correct|right))\b")
TAIL = _any(  # a remark behind a value
    r"\s*[,;(]*\s*\b(?:because|since|as(?! well)|which(?! gives| yields| makes| means| is (?:option |choice )?\S+$)|where|when|by|I hope|due|attained|achieved|reached)\b.*",
    rf"\s*[,;(]*\s*\bso\b(?!\W*{CHOICE}\W*$)[^\d$\\]*$",
    r"(?<=[\d$)}])(?: [a-z]+)? for\b[^,;]*$",
    r"\s*\((?!or\b|and\b|mod\b)(?:not |[a-z]{2,}).*",
    r"\s*(?:—| -- |[,;] (?:not|but|however|compare|(?:it|that|this) (?:can|does|is not|isn))\b).*",
    r"[，,]\s*(?:即|因为|但|此时).*",
)
SAYS = _any(rf"\b{IS}:?", r"\b(?:gets?|obtains?|ha(?:ve|s)|gives?|yields?|makes?|totals?|costs?|finds?)\b", r"\b(?:so|thus|hence|therefore),?\s", r"[:：]\s")
SAID = re.compile(  # a value with a unit: a formula or what has no words
    r"\W*?(?:\$[^$]+\$|(?:(?![A-Za-z]{2}|[一-鿿])[^$])+(?<![,;:=\s]))(?: (?:square |cubic )?[a-z]{2,}[.²³]?)?"
)
FORMULA = re.compile(r"(?<!\\)\$([^$]+)\$(?!\d)|\\\((.+?)\\\)")
PROSE = _any(
    r"\b(?:is|are|was|be|equals?|we|I|it|get|gets|so|thus|hence|therefore|gives?|have|has|makes?|answer|ans)\b",
    "^[a-z ]{2,}:",
    "[\u4e00-\u9fff]",
    "\n",
)

# What stands beside an answer -----------------------------------------------------------------------------------------

HEDGE = _any(
    r"\b(?:or|maybe|perhaps|possibly|alternatively|might|could|otherwise|else|if|vs|versus|depending)\b|或"
)
CORRECTION = _any(
    r"\b(?:wait|actually|no|not|correct\w*|instead|rather|sorry|mistake|wrong|so|then|thus|hence|therefore)\b"
)
ALTERNATIVE = _any(  # right behind an answer: another one
    r"[\s$]*\|[\s$]*(?=[-\d])",
    r"\W*(?:but\s+)?(?:or|maybe|perhaps|possibly|alternatively|(?:it\s+)?(?:might|could)(?:\s+also)?\s+be|vs\.?|versus"
    r"|and(?=[\s$]*[-\d.]+[\s$]*$))\b[\s,:(]*(?:maybe|even|also|it|is|be|could|equivalently|\s)*",
)
OTHER = re.compile(  # right before an answer: another one
    r"(\$[^$]+\$|[-−]?\d[\d./]*|(?-i:\(?\b[A-H]\b\)?))\s*,?\s*(?:\b(?:or|vs\.?|versus)\b|或)[\s$(]*(?:maybe |perhaps )?[\s$]*(?:[A-Za-z]\s*=\s*)?$",
    re.IGNORECASE,
)
JOINT = _any(  # what stands between two answers that belong together
    r"(?>\n\W*\w{1,2}[.):]|[\s$,;:&./|~*_–—()•、或和-]|\\[,;:! ()\[\]|\\]|\\q?quad|\\mid|\\text\s*\{\s*(?:and|or|vs\.?|versus)?\s*\}"
    r"|\\l(?:or|and)|\\vee|\\wedge|[A-Za-z](?:_\{?\d\}?)?\s*="
    r"|\b(?:and|or|vs|versus|as well as|also|both|is (?:one|a) \w+|is another(?: \w+)?"
    r"|the other(?: \w+)? is|another is|option \w+|case \w+|part \w+)\b)*",
    r"[\s$\\]*(?>\(?\w+\)?\s+){0,3}and[\s$]*",
)
REFUSED = re.compile(  # right before an answer: it is none
    r"(?:\b(?:not|never|cannot|except|exclud\w*|reject\w*|discard\w*|exceed\w*|whether|if|tempting to say"
    r"|(?:greater|less|more|fewer|larger|smaller|other) than|rather than|instead of|at least|at most)|n['’]t)"
    r"[^\w.!?\n]*(?:(?:think|believe|be|is|equals?|to|that|the|final|correct|answer|value|option)[^\w.!?\n]*)*"
    r"(?:[A-Za-z]\s*=)?[^\w.!?\n]*$|不(?:是|能是|等于)\W*$",
    re.IGNORECASE,
)
PART_BEFORE = re.compile(  # right before or after an answer: it is a part of a larger formula
    r"(?:[=(${\d})]\s*-|[\w})]\s*\+|[\d})]\s*/|\^"
    r"|\\(?:ne|neq|not ?=|[lg]eq?|times|cdot|sqrt(?:\[[^\]]*\])?\s*\{|log|ln|sin|cos|tan|pi)|[≠≤≥]"
    r"|(?:^|[\s$(])[\w\\]+\s*[<>]|\\frac\s*(?:\{[^{}]*\})?\s*\{)\s*$|\d\Z|(?:^|\s)[-−]\Z"
)
PART_AFTER = re.compile(
    r"\s*(?:\^(?!\s*\{?\s*\\circ)|/|[+-]\s*[\d\\]|\\(?:cdot|times|sqrt|pi|ln|log|frac)(?![a-z])|!(?=\s*(?:\$|"
    r"\\\)|\\\])))|\d|[.,]\d|_[\d{]|\s?[π√万亿千百]"
    r"|[A-Za-z](?![A-Za-z])|\s*(?:\\text\s*\{\s*)?(?:dozen|hundred|thousand|million|billion)\b"
)

# What takes an answer back --------------------------------------------------------------------------------------------

LEAD = r"^\W*(?:(?:no|wait|actually|hmm+|hold on|oh|oops|but|however|well|so|and|sorry|rather)\b\W*)+"
BAD = (
    r"(?:wrong|incorrect|mistaken|too (?:big|small|large)"
    r"|(?:(?:can)?not|n['’]t)(?: \w+){0,2} (?:right|correct|true|answer)(?! that| for))"
)
RETRACTED = _any(
    r"^\W*(?:(?:wait|hmm+|oh|well|actually|but)\W+)*no(?=\s*[,.!:;—–-]|\s*$|\s+(?:wait|that|this|it|actually|sorry)\b)"
    r"(?:\W*(?:wait|actually|sorry)\b)*",
    r"^\W*(?:please )?(?:nope|oops|whoops|correct(?:ion|ing)|scratch|strike|ignore|disregard|forget)\b",
    rf"^\W*(?:is|was) (?:\w+ )?{BAD}",
    rf"\b(?:that|this|it|i|answer|result|box\w*)\b['’]?(?:[^\w.]\w+){{0,3}}?(?:[^\w.]|(?=n['’]t)){BAD}",
    rf"{LEAD}(?:that|this)\b (?:\w+ )?(?:can(?:no|['’])t|does(?: not|n['’]t)|must|is(?: not|n['’]t))\b"
    r" (?:be|work|hold|satisfy|fit|match|make|possible|valid|what|in)\b",
    r"\bi (?:\w+ )?(?:made an? (?:\w+ ){0,2}(?:mistake|error|slip|typo)|forgot|missed|overlooked|mis\w+|dropped|swapped"
    r"|(?:double|over|under)[- ]?counted|counted \w+ \w+ twice|mixed up|meant|take (?:it|that) back)\b",
    r"\b(?:there (?:is|was) an? (?:\w+ )?(?:mistake|error)|my (?:bad|mistake|error)|on second thought|make that)\b",
    r"\b(?:let me|i(?:['’]ll| will| need to| must| have to)) (?:redo|correct|fix|start over|try again|revise|subtract|add)\b",
    rf"\b(?:should|ought to) (?:\w+ )?(?:be|have been|read|say)\b(?=\s*{VALUE})",
    rf"{LEAD}.{{0,20}}\b(?:question|problem) (?:\w+ )?(?:asks|asked|wants|wanted|is|says|said)\b",
    r"不对|(?<![没有])错了|算错|有误|更正|纠正|修正|不正确",
)
GUARD = _any(r"\b(?:if|whether|unless|would|might|otherwise|check that|make sure|common|tempting|any|no (?:mistake|error))\b")
DOUBT = _any(r"^\W*(?:wait|hmm+|hold on|actually|oh|but|however|alternatively|sorry)\b|\blet me\b", "等等|等一下|实际上")
ANEW = _any(  # in doubt, what follows is the new answer
    rf"\b(?:it|that|this|answer|value|result|total|count|number)(?:['’]s|\s{IS})\s*(?={VALUE})",
    rf"^\W*(?:(?:wait|hmm+|actually|oh|sorry|rather|no)\b\W*)+(?={VALUE}[^<>≤≥]*$)",
    r"^\W*(?:so|thus|hence|therefore),? \$?(?=[A-Za-z] ?= ?[^=]*$)",
)
CONFIRMED = _any(
    r"^\W*(?:yes|good|ok|okay|correct|right|great|perfect|indeed)\b(?=\W*(?:[,.!]|$))",
    r"\b(?:it|that|this|answer|result|everything|all)\b(?:['’]s| \w+){1,2}? (?:right|correct|fine|ok|good|consistent|valid)\b",
    r"\b(?:stands|checks? out|holds|confirmed|verified)\b|没错|(?<!不)正确|无误",
)

# Reading --------------------------------------------------------------------------------------------------------------


def visible_text(completion: str) -> str | None:
    """What stands after the last `</think>`, if there is one; None if the completion ended while it was thinking."""
    if completion.rfind("<think>") > completion.rfind("</think>"):
        return None
    return completion.rpartition("</think>")[2]


def read_final_answer(completion: str) -> str | None:
    """The final answer as plain text, None if there is none.

    It is the inside of the last `<answer>...</answer>` of the visible text; without one, the inside of the last
    `\\boxed{...}`; else all of the visible text. A tag or box that is opened last and never closed holds no answer. What
    the text behind takes back is none either; if that says another one, it is this.
    """
    text = visible_text(completion)
    if text is None:
        return None
    _, end, inside = (_answer_tags(text) or _boxes(text) or [(0, len(text), text)])[-1]
    answer = _unless_retracted(inside, text[end : end + MAX_AFTER]) if inside is not None else None
    return answer.strip() or None if answer is not None else None


def read_answer(completion: str) -> str | None:
    """The final answer of a mathematical completion, None if there is none; several answers are joined by commas.

    What stands after the last `</think>` is read. If it has an `<answer>...</answer>`, only the inside of the last one.
    Of that, the answer is, in this order: the last `\\boxed{...}` or `\\fbox{...}`; what is stated last ("the answer is
    ...", "####", "option B is correct"); the text itself if it is no prose; the value of the last sentence that has one.
    What has no tag or box is looked for in the last MAX_UNMARKED characters.

    There is no answer if a tag or box is opened last and never closed, if it is refused ("not \\boxed{7}"), or if it is
    a part of a larger formula ("-\\boxed{7}").

    "\\boxed{3} and \\boxed{4}" names two, and so does "\\boxed{3}, or maybe 4": neither equals the key 3. After
    "\\boxed{3}. No, that is wrong, it is 4." the answer is 4 (`_unless_retracted`).
    """
    text = visible_text(completion)
    tags = _answer_tags(text) if text is not None else []
    if tags:
        text = _read_spans(text, tags, may_be_part=False)
    if text is None:
        return None
    boxes = _boxes(text)
    answer = _read_spans(text, boxes) if boxes else _read_unmarked(text)
    if answer is not None and boxes and STATED.search(answer[:MAX_AFTER]):  # \boxed{\text{The answer is } 5}
        answer = _read_unmarked(re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", answer))
    return answer.strip() or None if answer is not None else None


def _answer_tags(text: str) -> list[Span]:
    spans: list[Span] = []
    for tag, following in itertools.pairwise([*re.finditer(r"</?answer>", text), None]):
        if tag[0] == "<answer>":
            is_closed = following is not None and following[0] == "</answer>"
            inside = text[tag.end() : following.start()] if is_closed else None
            spans.append((tag.start(), following.end() if is_closed else tag.end(), inside))
    return spans


def _boxes(text: str) -> list[Span]:
    """Every outermost \\boxed{...} and \\fbox{...}; `\\boxed 5` without braces holds the next word."""
    spans: list[Span] = []
    for match in re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s{}$\\.,]+)", text):
        if spans and match.start() < spans[-1][1]:
            continue  # inside the one before
        if match[1] != "{":
            spans.append((match.start(), match.end(), match[1]))
            continue
        end = closing_brace(text, match.end())
        spans.append(
            (match.start(), len(text) if end is None else end + 1, None if end is None else text[match.end() : end])
        )
    return spans


def closing_brace(text: str, start: int) -> int | None:
    """The position of the brace that closes the one opened before `start`; escaped braces do not count."""
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None


def _read_spans(text: str, spans: list[Span], may_be_part: bool = True) -> str | None:
    """The inside of the last span; those joined to it ("and", ",") and alternatives beside it follow after commas."""
    start, end, inside = spans[-1]
    if inside is None:
        return None
    before = text[max(0, start - 80) : start]
    is_part = may_be_part and (PART_BEFORE.search(before) or PART_AFTER.match(text[end : end + 20]))
    if REFUSED.search(before) or is_part:
        return None  # "not \\boxed{7}", "n > \\boxed{7}", "-\\boxed{7}": it is not the answer, or not all of it
    answers = [inside]
    for earlier in reversed(spans[:-1]):
        between = text[earlier[1] : min(start, earlier[1] + 200)]
        is_alternative = len(between) < 80 and HEDGE.search(between) and not CORRECTION.search(between)
        if earlier[2] is None or not (is_alternative or JOINT.fullmatch(between)):
            break
        answers.append(earlier[2])
        start = earlier[0]
    if other := re.search(OTHER, text[max(0, start - 80) : start]):
        answers.append(other[1])
    answer = ", ".join(dict.fromkeys(answer.strip() for answer in reversed(answers)))
    return _unless_retracted(answer, text[end : end + MAX_AFTER])


def _unless_retracted(answer: str, after: str) -> str | None:
    """The answer, unless what stands behind it changes it: then several ("7 or 8"), another one, or None.

    It is taken back by a sentence that says so ("No, that is wrong."): then the answer is what the rest says, if
    anything. It is replaced where the rest states an answer, or names one in doubt ("Wait, it's 8."). A check that ends
    well ("Wait, let me verify: 2+3=5, yes.") changes nothing.
    """
    if not answer.strip():
        return None
    after = _normal(after)
    first = re.split(r"[.\n](?:\s|$)", after[:120], maxsplit=1)[0]
    if (other := ALTERNATIVE.match(first)) and HAS_VALUE.search(first[other.end() :]):
        return f"{answer}, {_read_unmarked(first[other.end() :]) or ''}"
    rest, question = None, ""
    own = rf"(?<![\w.\\−-]){re.escape(answer.strip()[:40])}[\s$]*(?:{IS} )?(?:{BAD}|(?:is|does|can) ?(?:not|n['’]t))\b"
    for start, sentence in _sentences(after):
        taken_back = RETRACTED.search(sentence) or re.search(own, sentence)
        is_no = question and not re.search(r"right|correct|sure", question)  # it answers "Is there another?"
        if taken_back and not is_no and not GUARD.search(sentence):
            rest = after[start + taken_back.end() :].lstrip(" ,:;.!…")
        question = sentence if re.search(r"\w.*\?\s*$", sentence) else ""
    if rest is None:
        return _restated(answer, after)
    return _read_unmarked(rest) or (answer if CONFIRMED.search(rest) else None)


def _restated(answer: str, after: str) -> str:
    """The answer that a text behind one names last, by stating it or in doubt about the one before."""
    current, is_doubted = answer, False
    for _, sentence in _sentences(after):
        if CONFIRMED.search(sentence):
            is_doubted = False
            if "stands" in sentence:
                current = answer
            continue
        is_doubted = is_doubted or bool(DOUBT.search(sentence))
        anew = [*STATED.finditer(sentence), *(ANEW.finditer(sentence) if is_doubted else ())]
        said = (anew[-1].lastgroup and anew[-1][anew[-1].lastgroup]) or sentence[anew[-1].end() :] if anew else ""
        if not GUARD.search(sentence) and re.match(VALUE, said):
            current = _stated(said) or current
    return current


def _normal(text: str) -> str:
    """The text without white space that says nothing, without Markdown's marks, and with all formulas in $...$."""
    text = re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text))
    text = re.sub(r"^```.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\*\*(.+?)\*\*|__(.+?)__", lambda m: m[1] or m[2], text)
    display = re.compile(r"(?:\$\$|\\\[)(.*?)([.,]?\s*)(?:\$\$|\\\])", re.DOTALL)
    return display.sub(lambda m: f"${' '.join(m[1].split())}${m[2].strip()} ", text)


def _sentences(text: str) -> list[tuple[int, str]]:
    """Where each sentence starts, and the sentence."""
    ends = [m.end() for m in re.finditer(r"[.!?…](?=[\s)\"'*]|$)[)\"'*]*\s*|[。！？；．]|;\s|\n", text)]
    starts = [0, *ends]
    pairs = itertools.zip_longest(starts, ends, fillvalue=len(text))
    return [(start, text[start:end]) for start, end in pairs if text[start:end].strip()]


def _read_unmarked(text: str) -> str | None:
    """The answer of a text without tag and box."""
    text = _normal(text[-MAX_UNMARKED:])
    for match in reversed(list(STATED.finditer(text))):
        group = match.lastgroup
        behind = text[match.end() :].lstrip()
        sentence = match[group] if group else (_sentences(behind) or [(0, "")])[0][1]
        if not sentence.strip() or (NO_VALUE.match(sentence) and not group):
            continue
        before = text[max(0, match.start() - 40) : match.start() if group else match.end()]
        stated = _stated(sentence)
        if REFUSED.search(before) and group:
            continue
        if REFUSED.search(before) or stated is None:
            return None
        return _unless_retracted(stated, text[match.end() :] if group else behind[len(sentence) :])
    if not PROSE.search(text) and len(re.findall(r"[A-Za-z]{2,}", _words(text))) <= 2:
        is_labelled = re.match(r"(?!sin|cos|tan|log|ln|sqrt|not?\b)[A-Za-z]{2,}[,:]? ", text) and HAS_VALUE.search(text)
        return (is_labelled and _value(text)) or text
    for start, sentence in reversed(_sentences(text)):
        if not sentence.rstrip().endswith("?") and (answer := _value(sentence)):
            return _unless_retracted(answer, text[start + len(sentence) :])
    return None


def _words(text: str) -> str:
    return re.sub(r"\$[^$]*\$|\\\(.*?\\\)|\\text\s*\{[^}]*\}|\\[A-Za-z]+", " ", text)


def _stated(text: str) -> str | None:
    """The answer at the beginning of what is said to be the answer; None if that is a denial."""
    if denial := re.match(r"\W*not\b(?:.*?\bbut (?:rather )?)?", text, re.IGNORECASE):
        text = text[denial.end() :] if "but" in denial[0] else ""
    text = _without_remark(text)
    is_sentence = PROSE.search(text) or re.match(r"[A-Za-z]+ [a-z]+ ", _words(text))
    if is_sentence and not HEDGE.search(text):
        text = _value(text) or text
    text = re.sub(r"(?<!\{)[,;]?\s+or(?:\s+maybe|\s+perhaps|\s+possibly|\s+else)?\s+", ", ", text)
    return re.sub(r"[.。．!]+$", "", text).strip() or None


def _without_remark(text: str) -> str:
    """The text without "because ..." behind a value, and without what follows such a word and has no value."""
    remarks = (m for m in TAIL.finditer(text) if text[: m.start()].strip())
    remark = next((m for m in remarks if HAS_VALUE.search(text[: m.start()]) or not HAS_VALUE.search(m[0])), None)
    return (text[: remark.start()] if remark else text).strip()


def _value(sentence: str) -> str | None:
    """The value that a sentence ends with: a choice, a formula, what follows "is" or "=", a number; None without one."""
    sentence = _without_remark(sentence).rstrip(" .。．!")
    leads = r"(?:is|are|be|['’]s|so|thus|therefore|hence|but|rather|options?|choices?)"
    if choice := re.search(rf"(?:^|\b{leads}\b)\W{{0,3}}(?:the |option |choice )*({CHOICES})\W*$|^({CHOICE})[.)] ", sentence, re.I):
        return choice[1] or choice[2]
    if text := re.search(rf"^(?:so|thus|hence|therefore)\b.*\b{IS} (?:on )?(?:an? |the )?((?-i:[A-Z])[a-z]+|false|true)$|\b(no (?:\w+ )?solutions?)$", sentence, re.I):
        return text[1] or text[2]
    formulas = [(m.start(), m.end(), m[1] or m[2]) for m in FORMULA.finditer(sentence)]
    plain = FORMULA.sub(lambda m: " " * len(m[0]), sentence)
    numbers = [(m.start(), m.end(), m[0]) for m in re.finditer(NUMBER, plain)]
    telling = [f for f in formulas if re.search(r"[\d=<>\\(]", f[2])] or ([] if numbers else formulas)
    said = sentence[[0, *(m.end() for m in SAYS.finditer(plain))][-1] :].strip()
    said = re.sub(r"^(?:an?|the|only|exactly) ", "", said)
    if HAS_VALUE.search(said) and SAID.fullmatch(said) and not re.match(r"\$[^$]*=[^$]*\$.", said):
        formula = FORMULA.fullmatch(said)
        return _right_side(formula[1] or formula[2], sentence) if formula else said
    if telling and not (numbers and numbers[-1][0] > telling[-1][0]):
        answer = _read_spans(sentence, telling)
        return answer and _right_side(answer, sentence)
    relation = re.search(r"[\w\\]+\s*(?:[<>]=?|[≤≥≠]|!=).*$", plain)
    if relation:
        return relation[0]
    side = re.search(r"=\s*([^=\s][^=,;，一-鿿]*?)(?=,?\s+[A-Za-z]{2,}|[一-鿿,;，]|\W*$)[^=]*$", plain)
    if side and not (numbers and numbers[-1][0] >= side.end(1)):
        unsolved = re.search(r"(?:^|\s)(?:\d+[a-z]|[a-z](?:\^\d|²))\s*=[^=]*$", plain)
        return unsolved[0] if unsolved else side[1]
    return _read_spans(plain, numbers) if numbers else None


def _right_side(formula: str, sentence: str) -> str:
    """28 of x+y = 28, where the left side is a quantity; an equation that is asked for or to be solved stays whole."""
    left, _, right = formula.partition("=")[0], *formula.rpartition("=")[1:]
    names = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z]", left))
    is_number = not re.search(r"[A-Za-z,]", re.sub(r"\\[A-Za-z]+", "", right))
    is_quantity = is_number and len(names) > 1 and not left.strip().startswith("(")
    asked = re.search(r"equation|line|circle|curve|plane|parabola|ellipse|hyperbola|方程|直线", sentence)
    return right.strip() if is_quantity and not asked else formula
