"""The words, English and Chinese, by which `answer.py` finds an answer, and those that take it back.

Every pattern is matched against a few thousand characters at most.
"""

from __future__ import annotations

import re


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE | re.MULTILINE)


# Values ---------------------------------------------------------------------------------------------------------------

# The letter of an option: no article ("A cat"), no point of a formula ("A = 5")
CHOICE = (
    r"(?-i:\(?(?<![A-Za-z0-9_])[A-HJ]\)?)"
    r"(?![.,]?[A-Za-z0-9_]|['’]|\s*[=+*/^<>]"
    r"| (?!and|or|because|since|as|is|for|due|works|holds|fits|remains|satisf)[a-z])"
)
CHOICES = rf"{CHOICE}(?:(?:\s*[,/&、]\s*|,? (?:and|or) ){CHOICE})*"
_UNIT = (
    r"(?:[ckm]?m[²³]|[ckm]m|k?g|km/h|mph|(?:(?:平方)?(?:厘米|千米|毫米|米)|千克|公斤|小时|分钟)(?:/(?:小时|秒))?)(?!\w)"
)
NUMBER = (  # a number in prose, with a percent sign or a unit
    r"(?<![A-Za-z0-9_.])[-−]?\\?[$¥€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|:\d\d(?: ?[ap]m\b)?)?"
    rf"(?:\s?\\?%|\s?{_UNIT})?(?![A-Za-z0-9_])"
)
FORMULA = re.compile(r"(?<!\\)\$([^$]+)\$(?!\d)|\\\((.+?)\\\)")
NO_WORDS = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\text\s*\{[^}]*\}|\\[A-Za-z]+")
VALUE = rf"(?:[-−+(\[{{\s]*\\?[$¥€£]?[-−]?\.?\d|\$|\\[A-Za-z{{(]|√|{CHOICE}\W*$)"  # how one begins
HAS_VALUE = _any(r"\d|\$|\\[A-Za-z]|[π√∞]", rf"^\W*{CHOICE}")

# How an answer is stated ----------------------------------------------------------------------------------------------

IS = (
    r"(?:(?:is|are|was|equals?|becomes?|comes? (?:out )?to"
    r"|(?:(?:would|should|must|will)(?: \w+)?|has to|turns? out to) be)\b"
    r"(?: (?:therefore|thus|then|hence|just|indeed|actually|really|clearly|exactly|now|still|for sure)\b,?)*)"
)
STATED = _any(  # what follows, or what stands in a group, is the answer
    r"\b(?:answers?|ans)\b\.?(?: (?:to|for|of|in|here|choice|that|which|we)\b[^.:=\n]{0,60}?)?,? ?"
    rf"(?:{IS} ?:?|[:=：])",
    r"^\W*(?:(?:the )?final )?answer\b *(?:\n|[-–—] |(?=[-(\d$\\]))",
    rf"\b(?:correct|right|best|final) (?:option|choice|one|result|value)s? {IS} ?:?",
    rf"\b(?:choose|select|pick|finalize|go(?:ing)? with|went with) (?:(?:option|choice|answer) )?(?P<chosen>{CHOICES})",
    rf"(?<!\w)(?P<right>{CHOICES}) (?:works|holds|fits|remains|satisfies"
    r"|(?:is|are|must be) (?:the |our |my )*(?:(?!not)\w+ )?(?:correct|right|true|answer|only))\b",
    r"(?P<before>\$[^$\n]{1,80}\$|(?<![\w.,])[-−]?\d[\d,./]*%?) (?:is|are) (?:the|our|my) (?:\w+ )?answer\b",
    r"(?-i:(?P<item>[A-HJ])选?项?是?正确)",
    r"(?<![不没])选(?:择|项)?[:：]?\s?(?=[（(]?[A-HJ])",
    r"(?:答案?|正确的?选项)[】\]]?\s?(?:应?该?[是为為]|[:：])[:：]?|【答案】|####",
)
NO_ANSWER = _any(r"(?:in|as|above|below|given|unique|verified|consistent|reasonable|(?:indeed )?(?:correct|right))\b")
REFUSED = re.compile(  # right before an answer: it is none
    r"(?:\b(?:not|never|cannot|except|exclud\w*|reject\w*|discard\w*|exceed\w*|whether|if|tempting to say"
    r"|(?:greater|less|more|fewer|larger|smaller|other) than|rather than|instead of|at least|at most)|n['’]t)"
    r"[^\w.!?\n]*(?:(?:think|believe|be|is|equals?|to|that|the|final|correct|answer|value|option)[^\w.!?\n]*)*"
    r"(?:[A-Za-z]\s*=)?[^\w.!?\n]*$|不(?:是|能是|等于)\W*$",
    re.IGNORECASE,
)
PROSE = _any(  # more than a bare answer
    r"\b(?:is|are|was|be|equals?|we|I|it|gets?|so|thus|hence|therefore|gives?|have|has|makes?|answer|ans)\b",
    "^[a-z ]{2,}:",
    "[\u4e00-\u9fff]|\n",
)
LABEL = re.compile(r"(?!sin|cos|tan|log|ln|sqrt|not?\b)[A-Za-z]{2,}[,:]? ")  # "Answer 28", not "sin 30"

# The sentence that says the answer without the word -------------------------------------------------------------------

REMARK = _any(
    r"^\W*(?:check|verif\w+|sanity|note|indeed|remark|to (?:check|verify)|(?:let me|we can) (?:check|verify))\b"
)
UNSURE = _any(
    r"\b(?:could|might|may) be\b|\b(?:but|however)\b.*(?:\bnot\b|n['’]t\b|\bfails?\b|\bwrong\b)|约|可能",
    r"\b(?:not (?:sure|able)|unable|(?<!equally )likely|next step|mentions)\b|\blet me (?!know)",
)
TAIL = _any(  # a remark behind a value
    r"\s*[,;(]*\s*\b(?:because|since|as(?! well)|where|when|by|I hope|due|attained|achieved|reached"
    r"|which(?! gives| yields| makes| means| is (?:option |choice )?\S+$))\b.*",
    rf"\s*[,;(]*\s*\bso\b(?!\W*{CHOICE}\W*$)[^\d$\\]*$",
    r"(?<=[\d$)}])(?: [a-z]+){0,2} (?:for|in|on|after) [^,;]+$",
    r"\s*\((?!or\b|and\b|mod\b)(?:not |[a-h] is |[a-z]{2,}).*",
    r"\s*(?:—| -- |[,;] (?:not|but|however|compare|(?:it|that|this) (?:can|does|is not|isn))\b).*",
    r"\s+(?:(?:rather than|instead of)\b.*|(?:actually|instead|in fact)\W*$)",
    r"[，,]\s*(?:即|因为|但|此时|而?不是|而非).*",
)
SAYS = _any(  # the value follows
    rf"\b{IS}:?|\b(?:gets?|obtains?|ha(?:ve|s)|gives?|yields?|makes?|totals?|costs?|finds?)\b",
    r"\b(?:so|thus|hence|therefore),?\s|[:：]\s",
)
SAID = re.compile(  # a formula or what has no words, with a unit
    "\\W*?(?:\\$[^$]+\\$|(?:(?![A-Za-z]{2}|[\u4e00-\u9fff])[^$€£¥])+(?<![,;:=\\s]))"
    "(?: (?:square |cubic )?(?:[a-z]+s|[ckm]?m|k?g|m?l|mph|feet|percent|dozen|[a-z]+(?:and|red|ion))[.²³]?)?"
)
CHOSEN = _any(  # a sentence that ends with a choice, or begins with it
    r"(?:^|→|->|\b(?:is|are|be|['’]s|so|thus|therefore|hence|but|rather|say|options?|choices?)\b)"
    rf"\W{{0,3}}(?:the |option |choice )*({CHOICES})(?:选?项)?\W*\Z",
    rf"^({CHOICE})[.)] ",
)
WORD = _any(  # ... or with a name
    rf"^(?:so|thus|hence|therefore)\b.*\b{IS} (?:on )?(?:an? |the )?((?-i:[A-Z])[a-z]+|false|true)\Z",
    r"\b(no (?:\w+ )?solutions?)\Z",
)
SIDE = re.compile(  # the last side of an equation
    "=\\s*([^=\\s][^=,;，\u4e00-\u9fff]*?)(?=,?\\s+[A-Za-z]{2,}|[\u4e00-\u9fff,;，]|\\W*$)[^=]*$"
)
RELATION = re.compile(r"[\w\\]+\s*(?:[<>]=?|[≤≥≠]|!=).*$")
UNSOLVED = re.compile(r"(?:^|\s)(?:\d+[a-z]|[a-z](?:\^\d|²))\s*=[^=]*$")
NAME = r"\\(?:sin|cos|tan|angle|triangle|theta|alpha|beta)\b|(?<![A-Za-z\\])[A-Za-z]"
OPERATION = r"\\(?:[dt]?frac|sqrt|log|ln|sin|cos|tan|binom|cdot|times|pi|left|right)(?![A-Za-z])"
EQUATION = _any(r"\b(?:equation|line|circle|curve|plane|parabola|ellipse|hyperbola)\b|方程|直线")

# What stands beside an answer -----------------------------------------------------------------------------------------

HEDGE = _any(r"\b(?:or|maybe|perhaps|possibly|alternatively|might|could|otherwise|else|if|vs|versus|depending)\b|或")
CORRECTION = _any(
    r"\b(?:wait|actually|no|not|correct\w*|instead|rather|sorry|mistake|wrong|so|then|thus|hence|therefore)\b"
)
ALTERNATIVE = _any(  # right behind an answer: another one
    r"[\s$]*(?:\||->|→|~~)[\s$]*(?=[-\d])",
    r"\W*(?:或者?|也可能)是?",
    r"\W*(?:(?:but|(?:al)?though)\s+)?(?:or|maybe|perhaps|possibly|alternatively|vs\.?|versus"
    r"|(?:it\s+)?(?:might|could)(?:\s+also)?\s+be"
    r"|and(?=[\s$]*[-\d.]+[\s$]*$))\b[\s,:(]*+(?!equivalently)(?:maybe|even|also|it|is|be|could|\s)*",
)
OTHER = _any(  # right before an answer: another one
    r"(\$[^$]+\$|(?:[-−]?\d[\d./]*|(?-i:\(?\b[A-H]\b\)?)),?)\s*(?:\b(?:or|vs\.?|versus)\b|或)"
    r"[\s$(]*(?:maybe |perhaps )?[\s$]*(?:[A-Za-z]\s*=\s*)?\Z"
)
JOINT = _any(  # what stands between two answers that belong together
    r"(?>\n\W*\w{1,2}[.):]|\(\w\)|[\s$,;:&./|~*_–—()\[\]<=>?!•、或和-]|\\neq?|\\q?quad|\\mid"
    r"|\\[,;:! ()\[\]|\\]|[A-Za-z](?:_\{?\d\}?)?\s*="
    r"|\\text\s*\{\s*(?:and|or|vs\.?|versus)?\s*\}|\\l(?:or|and)|\\vee|\\wedge"
    r"|\b(?:and|or|vs|versus|as well as|also|both|is (?:one|a) \w+|is another(?: \w+)?"
    r"|the other(?: \w+)? is|another is|option \w+|case \w+|part \w+)\b)*",
    r"[\s$\\]*(?>\(?\w+\)?\s+){0,3}and[\s$]*",
)
PART_BEFORE = re.compile(  # right before or behind an answer: it is a part of a larger formula
    r"(?:[=(${\d})]\s*-|[\w})]\s*\+|[\d})]\s*/|\^"
    r"|\\(?:ne|neq|not ?=|[lg]eq?|times|cdot|sqrt(?:\[[^\]]*\])?\s*\{|log|ln|sin|cos|tan|pi)|[≠≤≥]"
    r"|(?:^|[\s$(])[\w\\]+\s*[<>]|\\frac\s*(?:\{[^{}]*\})?\s*\{)\s*$|\d\Z|(?:^|\s)[-−]\Z"
)
PART_BEHIND = re.compile(
    r"\s*(?:\^(?!\s*\{?\s*\\circ)|/|[+-]\s*[\d\\]|\\(?:cdot|times|sqrt|pi|ln|log|frac)(?![a-z])|!(?=\s*(?:\$|"
    r"\\\)|\\\])))|\d|[.,]\d|_[\d{]|\s?[π√万亿千百]"
    r"|[A-Za-z](?![A-Za-z])|\s*(?:\\text\s*\{\s*)?(?:dozen|hundred|thousand|million|billion)\b"
)

# What takes an answer back --------------------------------------------------------------------------------------------

LEAD = r"^\W*(?:(?:no|wait|actually|hmm+|hold on|oh|oops|but|however|well|so|and|sorry|rather)\b\W*)+"
WRONG = (
    r"(?:wrong|incorrect|mistaken|invalid|too (?:big|small|large)|off(?= by|\W*$|[.,])"
    r"|(?:(?:can)?not|n['’]t)(?: \w+){0,2} (?:right|correct|true|answer)(?! that| for))"
)
RETRACTED = _any(
    r"^\W*(?:(?:wait|hmm+|oh|well|actually|but)\W+)*no(?=\s*[,.!:;—–-]|\s*$|\s+(?:wait|that|this|it|actually|sorry)\b)"
    r"(?:\W*(?:wait|actually|sorry)\b)*",
    r"^\W*(?:please )?(?:nope|oops|whoops|correct(?:ion|ing)|scratch|strike|ignore|disregard|forget|cancel)\b",
    rf"^\W*(?:is|was) (?:\w+ )?{WRONG}|^\W*{WRONG}(?=\W*$|[,.:;!)])",
    r"^\W*(?:(?:but )?wait|hmm+|oh|hold on|but(?= that))\W+(?:that|this)(?:['’]s| is| was)"
    r" (?:the|an?|for|half|twice)\b",
    r"^\W*(?:(?:but )?wait|hmm+|oh|hold on)\W+i (?:need|have) to (?!double[- ]?check|check|verif|make|be|re-?check)",
    r"\bi should(?: not|n['’]t)? have\b",
    r"\b(?:that|this|it|i|answer|result|box\w*|calculation|computation)\b['’]?"
    rf"(?:[^\w.]\w+){{0,3}}?(?:[^\w.]|(?=n['’]t)){WRONG}",
    rf"(?:^\W*|{LEAD})(?:that|this)\b (?:\w+ )?(?:can(?:no|['’])t|does(?: not|n['’]t)|must|is(?: not|n['’]t))\b"
    r" (?:be|work|hold|satisfy|fit|match|make|possible|valid|what|in)\b",
    r"\bi (?:\w+ )?(?:made an? (?:\w+ ){0,2}(?:mistake|error|slip|typo)"
    r"|forgot(?! nothing| to mention)|missed|overlooked"
    r"|mis\w+|dropped|swapped|retract|withdraw|(?:double|over|under)[- ]?counted|counted \w+ \w+ twice|mixed up|meant?"
    r"|take (?:it|that) back)\b",
    r"\b(?:correct|chang|revis|updat|withdr)\w* (?:my|the|that) (?:answer|mind|result|mistake)",
    r"\b(?:a typo|never ?mind)\b|\b(?:that|this|which) (?:\w+ )?contradict",
    r"\b(?:there (?:is|was)|has|had|contains) an? (?:\w+ )?(?:mistake|error)\b|\boff by (?:one|\d)",
    r"\b(?:my (?:bad|mistake|error)|on second thought|make that)\b",
    r"\b(?:let me|i(?:['’]ll| will| need to| must| have to)) (?:redo|correct|fix|start over|try again|revise)\b",
    rf"{LEAD}.{{0,20}}\b(?:question|problem) (?:\w+ )?(?:asks|asked|wants|wanted|is|says|said)\b",
    r"不对|(?<!没)(?<!没有)错了|算错|有误|更正|纠正|修正|不正确|[漏多少看]算|漏[掉了]|看错",
    r"(?:答案|结果|上面|以上|这)[^，。没]{0,6}错误",
)
CONTRAST = _any(LEAD)
DENIED = _any(rf"[\s$]*(?:{IS} )?{WRONG}")  # right behind the answer itself
DENIED_IN_CONTRAST = _any(DENIED.pattern, r"[\s$]*(?:(?:is|does|can) ?(?:not|n['’]t)|,? but)\b")
ABOUT_TRUTH = _any(r"right|correct|sure")  # a question to which "no" denies the answer before
SUPPOSED = _any(  # nothing in such a sentence is meant
    r"\b(?:if|whether|unless|would|might|otherwise|check that|make sure|common|tempting"
    r"|any|general|naive|obvious|student|people|not? (?:wrong|incorrect|mistake|error))\b"
)
DOUBT = _any(
    r"^\W*(?:wait|hmm+|hold on|actually|oh(?!,? and)|alternatively|sorry|apologies|or rather|or maybe|better)\b",
    r"^\W*(?:(?:hmm|oh)\W+)?i think\b",
    r"^\W*(?:but|however)\b(?=.*\b(?:it|that|this|answer|value|result|total)\b)",
    r"^\W*(?:up)?on (?:\w+ )?(?:reflection|inspection)\b",
    r"\blet me re(?!-?(?:check|verif))|等等|等一下|实际上",
)
CHECK = _any(r"\b(?:double|re)?-?(?:check|verif)")
CORRECTED = _any(  # what follows is the new answer, if it is another one
    rf"\b(?:should|ought to) (?:\w+ )?(?:be|have been|read|say)\b\s*(?={VALUE})|应该?[为是]\s*(?=[-\d$\\A-H])"
)
ANEW = _any(  # in doubt, too
    rf"(?:['’]s|\s{IS}|\b(?:makes|gives)|[是为])\s*(?={VALUE})",
    r"^\W*(?:(?:wait|hmm+|actually|oh|sorry|or|rather|maybe|no|alternatively|better|i think)\b\W*)+"
    rf"(?={VALUE}[^<>≤≥]*$)",
    r"^\W*(?:so|thus|hence|therefore),? \$?(?=[A-Za-z] ?= ?[^=]*$)",
)
CONFIRMED = _any(
    r"^\W*(?:yes|good|ok|okay|correct|right|great|perfect|indeed)\b(?=\W*(?:[,.!]|$))",
    r"\b(?:it|that|this|answer|result|all)\b(?:['’]s| \w+){1,2}? (?:right|correct|fine|ok|good|consistent|valid)\b",
    r"\b(?:stands|checks? out|holds|confirmed|verified)\b|没错|(?<!不)正确|无误",
)
