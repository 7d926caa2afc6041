"""The words, English and Chinese, that find an answer and take it back; each in a few thousand characters at most."""

from __future__ import annotations

import re


def _any(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE | re.MULTILINE)


# Values ---------------------------------------------------------------------------------------------------------------
CHOICE = (  # the letter of an option: no article ("A cat"), no point of a formula ("A = 5")
    r"(?-i:\(?(?<![A-Za-z0-9_])[A-HJ]\)?|(?:(?<=[Oo]ption )|(?<=[Cc]hoice ))\(?[a-h]\)?)(?![.,]?[A-Za-z0-9_]|['’]"
    r"|\s*[=+*/^<>]| (?!and|or|because|since|as|is|it is|for|due|rather|instead|works|holds|fits|match|remains|satisf"
    r"|must|has to|should|seems|appears|looks|correct|the correct)[a-z])"
)
CHOICES = rf"{CHOICE}(?:(?:\s*[,/&、]\s*|,? (?:and|or) ){CHOICE})*"
_UNIT = (
    r"(?:[ckm]?m(?:[²³]|\^[23])|(?:km|mi|m)/[hs]|[ckm]m|k?g|mph"
    r"|(?:(?:平方)?[厘千毫]?米|千克|公斤|小时|分钟)(?:/小?[时秒])?)(?!\w)"
)
SO = "(?:so|thus|hence|therefore)"
NUMBER = (  # a number in prose, with a percent sign or a unit
    rf"(?<![A-Za-z0-9_.])[-−]?\\?[$¥€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+|:\d\d(?: ?[ap]m\b)?)?(?:\s?\\?%"
    rf"|\s?{_UNIT}| (?:in|out of) \d+(?=\W*$))?(?![A-Za-z0-9_])"
)
FORMULA = re.compile(r"(?<!\\)\$([^$]+)\$(?!\d)|\\\((.+?)\\\)")
NO_WORDS = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\text\s*\{[^}]*\}|\\[A-Za-z]+")
VALUE = rf"(?:[-−+(\[{{\s]*\\?[$¥€£]?[-−]?\.?\d|\$|\\[A-Za-z{{(]|√|{CHOICE}\W*$)"  # how one begins
HAS_VALUE = _any(r"\d|\$|\\[A-Za-z]|[π√∞]", rf"^\W*{CHOICE}")
MARK = re.compile(  # Markdown and the end of a proof
    r"(?m)^```.*$|\*\*(.+?)\*\*|__(.+?)__|(?<!\S)_([^_\n]+)_(?!\S)|\$?\\(?:black)?square\$?|[∎■□]|[:;]-?\)|<<[^<>\n]*>>"
)
STRUCK = re.compile(r"~~(?=\S)[^~\n]{1,200}~~")

# How an answer is stated ----------------------------------------------------------------------------------------------
IS = (
    r"(?:(?:is|are|was|equals?|becomes?|comes? (?:out )?to|(?:(?:would|should|must|will)(?: \w+)?|has to"
    r"|turns? out to) be)\b(?:,? (?:therefore|thus|then|hence|just|indeed|actually|really|clearly|exactly|now|still"
    r"|for sure|only|simply|of course)\b,?)*)"
)
STATED = _any(  # what follows, or what stands in a group, is the answer
    rf"\b(?:answers?|ans)\b\.?(?: choice)?(?: (?:to|for|of|in|here|that|which|we)\b[^.:=\n]{{0,60}}?)?,? ?(?:{IS} ?:?"
    rf"|[:=：](?!>)|[=-]>|→)|^\W*(?:(?:the )?final )?ans(?:wer)?\b *(?:\n|[-–—] |(?=(?!->)[-(\d$\\]|{CHOICE}\W*$))",
    rf"\b(?:correct|right|best|final) (?:option|choice|one|result|value)s? {IS} ?:?",
    rf"\b(?:choose|select|pick|finalize|go(?:ing)? with|went with) (?:(?:option|choice|answer) )?(?P<chosen>{CHOICES})",
    rf"(?<!\w)(?P<right>{CHOICES}) (?:works|holds|fits|match(?:es)?|remains|satisfies|it is|as (?:the|our"
    rf"|my) (?:\w+ )?(?:answer|choice)|(?:is|are|(?:must|should|has to|appears to) be|seems|looks) (?:the |our "
    rf"|my )*(?:(?!not|wrong|worst)\w+ )?(?:correct|right|true|answer|only|best|choice|option|solution|one))\b",
    r"(?P<before>\$[^$\n]{1,80}\$|(?<![\w.,])[-−]?\d[\d,./]*%?) (?:is|are) (?:the|our|my) (?:(?!wrong"
    r"|incorrect)\w+ )?answer\b|(?-i:(?P<item>[A-HJ])选?项?(?:是?正确|符合))|(?<![不没])(?<!不[能应该可])选(?:择"
    r"|项)?[:：]?\s?(?=[（(]?[A-HJ])|(?:答案?|(?<!不)正确的?(?:选项)?)[】\]]?\s?(?:[应该就便改]*[是为為]|[:：])[:：]?"
    r"|答案\s?(?=[（(]?[A-HJ])|【答案】|####",
)
NOTHING = _any(r"(?:in|as|above|below|given|unique|verified|consistent|reasonable|(?:indeed )?(?:correct|right))\b")
REFUSED = re.compile(  # right before an answer: it is none
    r"(?:\b(?:not|never|nor|neither|cannot|except|exclud\w*|reject\w*|discard\w*|exceed\w*|whether|if|tempting to say"
    r"|(?:greater|less|more|fewer|larger|smaller|other) than|rather than|instead of|at least|at most)"
    r"|n['’]t)[^\w.!?\n]*(?:(?:think|believe|be|is|equals?|to|that|the|final|correct|answer|value"
    r"|option)[^\w.!?\n]*)*(?:[A-Za-z]\s*=)?[^\w.!?\n]*$|(?:不(?:是|能是|等于)|大于|小于|超过|负|\d的)\W*$|\b(?:any"
    r"|every|all)\w* but[^\w.!?\n]*$|\b(?:half|twice|double|minus|root|reciprocal|square|cube)(?: of)?[\s$]*$",
    re.IGNORECASE,
)
PROSE = _any(  # more than a bare answer
    r"['’]s\b|\b(?:is|are|was|be|equals?|we|I|it|gets?|so|thus|hence|therefore|gives?|have|has|makes?|answer|ans)\b",
    "^[a-z ]{2,}:|[\u4e00-\u9fff]|\n|[?？]\\s*$",
)
QUESTION = re.compile(r"(?:\w\W*[?？]|吗\W?)[\s)\"'*]*\Z")
LABEL = re.compile(r"(?!sin|cos|tan|log|ln|sqrt|not?\b)[A-Za-z]{2,}[,:]? ")  # "Answer 28", not "sin 30"

# The sentence that says the answer without the word -------------------------------------------------------------------
REMARK = _any(
    r"^\W*(?:check|verif\w+|sanity|note|indeed|remark|here,? (?:we|i) used?|equality(?!.*\bso\b)|to (?:check|verify)"
    r"|(?:let me|we can) (?:check|verify)|验算|检验|验证)\b|^.*\b(?:if|without|had)\b.*\bwould\b",
)
CONCLUSION = _any(rf"\b(?:{SO}|consequently|altogether|in (?:all|total)|ends? up|giv(?:es|ing))\b|所以|因此|故")
ASIDE = re.compile(r"\W*[(（](?!or\b)(?:[A-Za-z]{2,} |[\u4e00-\u9fff])[^()（）]*[)）]?\W*")
TOLD = _any(  # a sentence that describes a conclusion before it, or repeats what was given
    r"^\W*(?:that|this|these|those|it|which|here|of (?:these|those)|note)\b",
    r"\b(?:start|beg[ai]n|assum|recall|remember|original|initial|given|told|includ|count|had\b)",
)
GIVEN = _any(r"\b(?:in|from|by|of) the (?:problem|question|story|statement|text)\b|\bmentioned\b|题目?中|题设")
UNSURE = _any(
    r"^\W*(?:next\b|now,? (?:let|(?:we|i) (?:(?:need|have|want) to|must)\b))|\b(?:could|might|may) be\b|\b(?:but"
    r"|however)\b.*(?:\bnot\b|n['’]t\b|\bfails?\b|\bwrong\b)|约|(?<!等)可能",
    r"\b(?:maybe|perhaps|possibly|not (?:sure|able)|unable|(?<!equally )likely|next step|mentions)\b|\blet me (?!know)",
)
TAIL = _any(  # a remark behind a value
    r"\s*[,;(]*\s*\b(?:because|since|as(?! well)|where|when|by|I hope|due|attained|achieved|reached|occurs|happens"
    r"|(?:and |with )?equality|and (?:we|this|that)|which(?! gives| yields| makes| means| is (?:option "
    r"|choice )?\S+$))\b.*",
    rf"(?<=\S)[,;(]*\s+\bso\b(?!\W*{CHOICE}\W*$)[^\d$\\]*$",
    r"(?<=[\d$)}])(?: [a-z]+){0,3} (?:for|in|on|over|across|during|after|at|when|if|of the|(?:with|from|among|to(?! get"
    r"| obtain))(?! \d)(?!.*=)) (?:(?!\b(?:gets?|gives?|giving|obtain|have|is|are|equals?|yields?|makes?"
    r"|find)\b)[^,;]){1,120}$|(?<=[\d$)}]) (?:[a-z]+ ){2,3}than .*|(?<=\w),? \d[\d.]* (?:more|less|fewer) than .*",
    r"(?<=[\d$)}])(?: [a-z]+)? per (?!hour|minute|second|day|week|month|year)[a-z]+\W*$|\s*\((?!or\b|and\b|mod\b"
    r"|maybe\b|perhaps\b|possibly\b|alternatively\b)(?:not |[a-h] is |[a-z]{2,}).*"
    r"|\s*[(（][\u4e00-\u9fff][^()（）]*[)）]\W*$",
    r"(?<=[\w$%})]) [(\[](?=\d*\.\d+\)|[^()\[\]]*(?:[-+*/×·÷−=]|\\times|\\cdot|[a-z]{4,}))"  # (60 - 40), (6 boxes * 7)
    r"(?:[\d\s.$=+*/×·÷−-]|,(?=\d{3})|\\times|\\cdot|x(?= \d)|(?!pi|sqrt|log)[a-z]{2,}+)++[)\]]\W*$",
    r"\s+(?:in all|(?:in )?total|altogether|overall|each|left(?: over)?|remaining|apiece)\W*$|\s*(?:—| -- | (?:#|//) "
    r"|,? and not\b|[,;] (?:(?:not|but|however|compare)\b|(?:it|that|this) (?:can|does|is not|isn))).*"
    r"|,?\s+(?:(?:rather than|instead of)\b.*|(?:actually|instead|in fact)\W*$)"
    r"|[，,]\s*(?:即|因为|但|此时|而?不[是选]|而非).*",
)
SAYS = _any(  # the value follows
    rf"\b{IS}:?|\b(?:that|it|this)['’]s\b|\b(?:gets?|obtains?|ha(?:ve|s)|gives?|yields?|makes?|totals?|costs?"
    rf"|finds?)\b|\b{SO},?\s|[:：]\s",
)
SAID = re.compile(  # a formula or what has no words, with a unit
    "\\W*?(?:\\$[^$]+\\$|(?:(?![A-Za-z]{2}|[\u4e00-\u9fff])[^$€£¥])+(?<![,;:=\\s]))(?: (?:square |cubic )?(?:[a-z]+s"
    "|[ckm]?m|k?g|m?l|mph|feet|percent|dozen|[a-z]+(?:and|red|ion))(?:[.²³]|\\^[23]|/[a-z]+)?)?"
)
CHOSEN = _any(  # a sentence that ends with a choice, or begins with it
    rf"(?:^|→|[-=]>|⇒|\b(?:is|are|be|['’]s|so|thus|therefore|hence|but|rather|say|options?|choices?|letter|think"
    rf"|match(?:es)?|fits|leav(?:es|ing)|elimination|mark|answer|choosing|(?:clear|definite|obvious|certain|sure)ly"
    rf"|(?:opt|vote) for|(?:points?|leads?|corresponds?) to|arrive at|gives us)\b)\W{{0,3}}(?:the |only |option "
    rf"|choice )*({CHOICES})(?:选?项)?\W*\Z|^({CHOICE})[.)] |\bonly (?:option |choice )?({CHOICE}) (?:is|equals)",
)
_SPELLED = r"(?:zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+[nrfxhe]ty|hundred)"
WORD = _any(  # ... or with a name, or a number in words
    rf"\b{IS} ({_SPELLED}(?:[ -](?:and )?{_SPELLED})*)\Z|^(?:so|thus|hence|therefore|there)\b.*\b(?:{IS}|has"
    rf"|have) ({_SPELLED})(?! of)(?: [a-z]+){{1,3}}\Z",
    rf"^{SO}\b.*\b{IS} (?:on )?(?:an? |the )?((?-i:[A-Z])[a-z]+(?: \d{{1,2}})?|false|true|even|odd)\Z"
    rf"|^{SO},? (yes|no)\Z|\b(no (?:\w+ )?solutions?)\Z",
    r"\b([a-z](?:_?\d)? ?= ?[^=\s]+(?:(?:,|,? (?:or|and)) [a-z](?:_?\d)? ?= ?[^=\s]+)+)\Z",
)
ARROW = re.compile(r"=>|[⇒⟹∴]|\\(?:Rightarrow|Longrightarrow|implies|therefore)(?![A-Za-z])\\?| → ")
SIDE = re.compile(  # the last side of an equation
    "=\\s*([^=\\s][^=,;，\u4e00-\u9fff]*?)(?=,?\\s+[A-Za-z]{2,}|[\u4e00-\u9fff,;，]|\\W*$)[^=]*$"
)
RELATION = re.compile(r"[\w\\]+\s*(?:[<>]=?|[≤≥≠]|!=).*$")
UNSOLVED = re.compile(r"((?:^|\s)(?:\d+[a-z]|[a-z](?:\^\d|²))\s*=[^=]*)$")
NAME = r"\\(?:sum|prod|int|sin|cos|tan|angle|triangle|theta|alpha|beta)\b|(?<![A-Za-z\\])[A-Za-z]"
OPERATION = r"\\(?:circ|degree|[dt]?frac|sqrt|log|ln|sin|cos|tan|binom|cdot|times|pi|left|right)(?![A-Za-z])"
EQUATION = _any(r"\b(?:equation|line|circle|curve|plane|parabola|ellipse|hyperbola)\b|方程|直线")

# What stands beside an answer -----------------------------------------------------------------------------------------
HEDGE = _any(r"\b(?:or|maybe|perhaps|possibly|alternatively|might|could|otherwise|else|if|vs|versus|depending)\b|或")
CORRECTION = _any(rf"\b(?:wait|actually|not?|correct\w*|instead|rather|sorry|mistake|wrong|then|{SO})\b")
ALTERNATIVE = _any(  # right behind an answer: another one
    r"[\s$]*(?:\||->|→|~~)[\s$]*(?=[-\d])|\W*(?:或者?|也可能)是?|\W*(?:(?:but|(?:al)?though)\s+)?(?:or|maybe|perhaps"
    r"|possibly|alternatively|vs\.?|versus|(?:it\s+)?(?:might|could|may)(?:\s+also)?\s+be|(?:another|the other"
    r"|a second) (?:(?:possible|valid) )?(?:answer|solution|value|possibility|option) is|and(?=[\s$]*[-\d.]+"
    r"[\s$]*$))\b[\s,:(]*+(?!equivalently)(?:maybe|even|also|it|is|be|could|\s)*",
)
OTHER = _any(  # right before an answer: another one
    r"(\$[^$]+\$|(?:[-−]?\d[\d./]*|(?-i:\(?\b[A-H]\b\)?)),?)\s*(?:\b(?:or|vs\.?|versus)\b|或|(?<!\|)\|)[\s$(]*(?:maybe "
    r"|perhaps )?[\s$]*(?:[A-Za-z]\s*=\s*)?\Z"
)
JOINT = _any(  # what stands between two answers that belong together
    r"(?>\n\W*\w{1,2}[.):]|\(\w\)|[\s$,;:&./|~*_–—…()\[\]<=>?!•、或和-]|\\neq?|\\q?quad|\\mid|\\[,;:! ()\[\]|\\]"
    r"|[A-Za-z](?:_\{?\d\}?)?\s*=|\\text\s*\{\s*(?:and|or|vs\.?|versus)?\s*\}|\\l(?:or|and)|\\vee|\\wedge|\b(?:and|or"
    r"|vs|versus|plus|as well as|also|both|is (?:one|a) \w+|is another(?: \w+)?|the other(?: \w+)? is|another is"
    r"|option \w+|case \w+|part \w+)\b)*|[\s$\\]*(?>\(?\w+\)?\s+){0,3}and[\s$]*",
)
PART_BEFORE = re.compile(  # right before or behind an answer: it is a part of a larger formula
    r"(?:[=(${\d})]\s*-|[\w})]\s*\+|[\d})]\s*/|\^|\\(?:ne|neq|not ?=|[lg]eq?|times|cdot|sqrt(?:\[[^\]]*\])?\s*\{|log"
    r"|ln|sin|cos|tan|pi)|[≠≤≥]|(?:^|[\s$(])[\w\\]+\s*[<>]|\\frac\s*(?:\{[^{}]*\})?\s*\{)\s*$|\d\Z|(?:^|\s)[-−]\Z"
)
PART_BEHIND = re.compile(
    r"\s*(?:\^(?!\s*\{?\s*\\circ)|/|[+-]\s*[\d\\]|\\(?:cdot|times|sqrt|pi|ln|log|frac)(?![a-z])|!(?=\s*(?:\$|\\\)"
    r"|\\\])))|\d|[.,]\d|_[\d{]|\s?(?:[π√万亿千百]|的(?:\d|[一二两三四几平立]))|[A-Za-z](?![A-Za-z])"
    r"|\s*(?:\\text\s*\{\s*)?(?:dozen|hundred|thousand|million|billion)\b"
)

# What takes an answer back --------------------------------------------------------------------------------------------
LEAD = r"^\W*(?:(?:no|wait|actually|hmm+|hold on|oh|oops|but|however|well|so|and|sorry|rather)\b\W*)+"
WRONG = (
    r"(?:wrong|incorrect|mistaken|invalid|flawed|too (?:big|small|large|hasty)|off(?= by|\W*$|[.,])|(?:(?:can)?not"
    r"|n['’]t)(?: \w+){0,3} (?:right|correct|true|answer)(?! that| for))"
)
_SLIP = r"(?:an? )?(?:\w+ )?(?:slip|typo|mistake|error|oversight|mis(?:count|calculat|read|cop)\w*|(?:over|under)count)"
_SLIPPED = r"(?:slipped(?! on)|went missing|slip of the pen|(?:got|was|were) (?:swapped|mis(?!s)\w+|counted twice))"
RETRACTED = _any(
    r"^\W*(?:(?:wait|hmm+|oh|ah|er|well|actually|but)\W+)*no(?!\W+there)(?=\s*[,.!:;—–-]|\s*$|\s+(?:wait|that|this|it"
    r"|actually|sorry)\b)(?:\W*(?:wait|actually|sorry)\b)*|^\W*(?:please )?(?:nope|oops|whoops|correct(?:ion|ing)"
    r"|not quite|scratch|strike|ignore|disregard|forget|cancel)\b",
    rf"^\W*(?:is|was) (?:\w+ )?{WRONG}|^\W*{WRONG}(?=\W*$|[,.:;!)])",
    r"^\W*(?:(?:but )?wait|oh|hold on|but(?= that))\W+(?:that|this)(?:['’]s| is| was) (?:the|an?|for|half|twice)\b"
    r"|^\W*(?:(?:but )?wait|hmm+|oh|hold on)\W+i (?:need|have) to (?!double[- ]?check|check|verif|make|be|re-?check)",
    rf"\b(?:that|this|it|i|above|(?<!['’]s )(?:answer|result|box\w*|calculation|computation|approach"
    rf"|reasoning))\b['’]?(?:[^\w.](?!\d)\w+){{0,3}}?(?:[^\w.]|(?=n['’]t)){WRONG}",
    r"(?:\bi(?: am|['’]m)|^\W*)\s?(?:not|un)(?: ?\w+){0,2}? ?(?:sure|certain|confident|convinced)\b(?! how| why| what)"
    r"|\bi should(?: not|n['’]t)? have\b|\bstand corrected\b|\bsomething(?:['’]s| \w+)(?: be)? (?:wrong|off)\b",
    rf"{LEAD}(?:that|this|it) (?:fails|violates)\b|(?:^\W*|{LEAD})(?:that|this)(?:['’]s not| (?:\w+ )?(?:can(?:no"
    rf"|['’])t|does(?: not|n['’]t)|must|is(?: not|n['’]t)))\b (?:add|be(?! (?:an? (?!mistake|error)|improved|avoided"
    rf"|larger|smaller))|work|hold(?! for)|satisfy|fit|match|make|possible|valid|what|it|in)\b|\bwe (?:forgot|missed"
    rf"|overlooked)\b(?! nothing| to mention)|\bi doubt\b.*|\bi (?:do not|don['’]t) (?:think|believe) (?:so|that|this"
    rf"|it)\b.*|^\W*(?:this is a )?contradiction\W*$"
    rf"|\bi(?:['’]ve)? (?:\w+ ){{0,2}}(?:made an? (?:\w+ ){{0,2}}(?:mistake|error|slip|typo)|forgot(?! nothing"
    rf"| to mention)|missed|overlooked|messed|slipped|(?:left out|neglected|ignored|omitted|dropped)(?! (?:the |some "
    rf"|all )?(?:details?|units?|proof|steps?|routine))|mis\w+|swapped|retract|withdraw|(?:double|over"
    rf"|under)[- ]?counted|counted (?:\w+ ){{1,3}}twice|mixed up|meant?|take (?:it|that) back)\b",
    r"\b(?:correct|chang|revis|updat|withdr)\w* (?:my|the|that) (?:answer|mind|result|mistake)|chang\w+ (?:this"
    r"|that) to",
    rf"(?<!nothing )\b{_SLIPPED}\b|^\W*{_SLIP}(?=\W*$|[:,.;!]| (?:in|on|of|here|above)\b)|\b(?:that|this"
    rf"|it)(?: \w+)? (?:was|is|turns out to be) (?:an? |my )?(?:{_SLIP}|careless)\b(?! to\b)|\b(?:see|spot|notice|found"
    rf"|find) (?:the|my|an?) {_SLIP}\b|^\W*(?:sorry|(?:my )?apologies)\b(?! (?:for|about) (?!that|this))"
    rf"|^\W*(?:please )?(?:replace|change|read) .{{1,40}}\b(?:by|with|to|as|instead)\b|\bi take (?:this|that|it|back)\b"
    rf"|~~[^~\n]{{1,80}}~~|^\W*(?:probably|likely) {WRONG}|\bmy \w+ was {WRONG}",
    r"\b(?:a typo|never ?mind)\b|\b(?:that|this|which) (?:\w+ )?contradict|\b(?:there(?:['’]s| is| was| must be)|has"
    r"|had|contains) an? (?:\w+ )?(?:mistake|error|slip)\b|\boff by (?:one|\d)|\b(?:my (?:bad|mistake|error)"
    r"|on second thought|make that)\b|\b(?:let me|let['’]s|i(?:['’]ll| will| need to| must| have to)) (?:redo|correct"
    r"|fix|start over|try again|revise)\b",
    rf"{LEAD}.{{0,20}}\b(?:question|problem) (?:\w+ )?(?:asks|asked|wants|wanted|says|said)\b",
    r"^\W*不[,，]|(?<!没)(?<!没有)(?:错了|算错|写反|弄错|写错|记错)|刚才忘|不对|不确定|有误|更正|纠正|修正|不正确"
    r"|(?<!易)(?<!要)(?:[漏多少看]算|漏[掉了])|看错|这是?不可能|(?:答案|结果|上面|以上|这)[^，。没]{0,6}错误",
)
THIS = _any(r"\W*(?:but )?(?:this|that)\b")
AT_ONCE = _any(  # right behind an answer only: further on it may be said of something else
    RETRACTED.pattern,
    rf"^{THIS.pattern}(?: \w+)? (?:(?:is|seems) (?:impossible|absurd|not (?:among|one of))|fails|violates)\b",
)
DENIED_BEFORE = _any(r"(?:^\W*|\b(?:it|this|that|answer|result)(?: is|['’]s) (?:\w+ )?)not\W{1,2}$|不是\W{0,2}$")
DENIED = _any(rf"[\s$]*(?:(?:{IS} )?{WRONG}|fails|(?:does not|doesn['’]t) (?:work|fit)|is impossible)")
DENIED_IN_CONTRAST = _any(DENIED.pattern, r"[\s$]*(?:(?:is|does|can) ?(?:not|n['’]t)|,? but)\b")
ABOUT_TRUTH = _any(r"right|correct|sure")  # a question to which "no" denies the answer before
IMAGINED = _any(  # it is somebody else's answer, and so it is if "That is wrong." follows
    r"\b(?:(?<!th[ai][ts] )(?<!\bi )(?:would|might)|at first|earlier i|first got|common|tempt\w+|any|in general"
    r"|generally|naive|obvious|student|people|claims?)\b"
)
OF_OTHERS = _any(  # before a box: somebody else's answer, or a former one
    rf"\b(?:(?:student|pupil|classmate|friend|someone|people|(?:text)?book|worksheet)s?\b(?!.*\b{SO}\b)"
    r"|(?<!\bI )(?<!\bwe )(?:claim|argue|wrote|write|boxed|posted)\w*"
    r"|(?:\w+['’]s|wrong|incorrect|tempting|common|earlier|previous|first) (?:\w+ )?"
    r"(?:attempt|solution|answer|argument|draft|guess|mistake|error|work))\b(?!.*\bbut\b)|有人|同学",
    r"(?:[\"“「]|``)[^\"”」\n]*\Z",
)
OTHERS_ERROR = _any(  # ... if something near says that it is wrong
    rf"\b{WRONG}\b|\b(?:mis(?:take|print|count|read)|error|fail|forg[eo]t|overlook|ignor|miss|flaw|twice|double|but\b"
    rf"|however|(?:the|our|my) (?:correct|right|true|actual|real))|错|不对|漏",
)
QUOTATION = re.compile(r"\"[^\"\n]{20,}\"|“[^“”\n]{20,}”|``[^`'\n]{20,}''|「[^「」\n]{20,}」")
OWN = _any(r"\b(?:I|me|we|us|my|our|answer|conclusion|result|therefore|so|thus|hence)\b|答案")  # right before it
SUPPOSED = _any(  # nothing in such a sentence is meant
    IMAGINED.pattern,
    r"(?<!fails )\bfor \$?[a-z]\$? ?=|\b(?:if|whether|unless|otherwise|check that|make sure"
    r"|not? (?:wrong|incorrect|mistake|error))\b",
)
DOUBT = _any(
    r"^\W*(?:(?:but|ah+|oh|or|so|well|no)\b\W+)*(?:wait|ah+|hmm+|hold on|actually|oh(?!,? and)|alternatively|sorry"
    r"|(?:my )?apologies|pardon|er+|argh|damn|rather|or maybe|better|then again|(?:edit|update|corrected|revised|typo"
    r"|errata)(?=:))\b|^\W*(?:(?:hmm|oh)\W+)?i think\b|^\W*(?:but|however)\b(?=.*\b(?:it|that|this|answer|value|result"
    r"|total|we (?:also |still )?(?:need|must|have))\b)|^\W*(?:up)?on (?:\w+ )?(?:reflection|inspection)\b"
    r"|^\W*in fact,? (?:it|the answer)\b|\blet me re(?!-?(?:check|verif))|\b(?:re-?(?:check|count|read|comput|calculat"
    r"|examin|add)|look(?:ed|ing)? again|(?:second|closer) (?:look|glance))\w*|^\W*edit\b|\bi (?:now )?(?:see|notice"
    r"|reali[sz]e)d?\b|\bto be (?:precise|exact)|\bthen i['’]d be|重新|等等|等一下|实际上|抱歉",
)
_RIGHT = "(?:true|actual|correct(?:ed)?|real(?:ity)?|right(?! side| hand|-)|proper)"
CONCLUDED = _any(  # what follows is a conclusion, and so an answer
    rf"^(?:[^,;:]{{0,60}}\b(?:\w*check\w*|again|total|not|but|however|instead|also|actually)\b[^,;:]{{0,40}}[,;]? "
    rf"|\W*)(?:(?:{SO}|in fact),? )?(?:it|that|there|(?:the|our) (?:correct )?(?:answer|count|total|number"
    rf"|result))(?:['’]s(?: actually| really)?|\s{IS})\s*(?={VALUE})|\b(?:the|our|my"
    rf"|in) {_RIGHT} [^.\d$]{{0,30}}?(?:\s{IS}|:)\s*(?={VALUE})|^\W*{_RIGHT} \w+(?:\s{IS}|:)\s*(?={VALUE})|\b(?:i['’]d"
    rf"|i would) rather say\s*(?={VALUE})"
)
CORRECTED = _any(  # what follows is the new answer, if it is another one
    rf"\b(?:should(?:['’]ve)?|ought to) (?:\w+ )?(?:be|have been|been|read|say|contain|come out (?:at|as"
    rf"|to))\b\s*(?={VALUE})|应[该当]?[为是]\s*(?=[-\d$\\A-H])",
)
ANEW = _any(  # in doubt, too
    rf"(?:['’]s(?: \w+ly)?|\s{IS}|\b(?:makes|gives|giving|making(?: it)?|(?:i|we)(?: now)? (?:get|obtain|find|have"
    rf"|count)|i\.e\.,?|read it as|(?:come|work)s? out (?:at|as))|[是为得]|共有?)\s*(?={VALUE}[^<>≤≥]*$)|(?:\bso"
    rf"|:)\s+(?={VALUE}[^=<>≤≥]*$)|^\W*(?:(?:wait|hmm+|actually|oh|er+|well|pardon|sorry|or|so|rather|maybe|no"
    rf"|alternatively|better|i think)\b\W*)+(?={VALUE}[^<>≤≥]*$)|^\W*{SO},? (?=\$?[A-Za-z] ?= ?[^=]*$"
    rf"|{VALUE}[^=<>≤≥]*$)|^[\s\d+*/×·()$-]*=\s*(?={VALUE}[^=<>≤≥]*$)",
)
CONFIRMED = _any(
    r"^\W*(?:yes|good|ok|okay|correct|right|great|perfect|indeed)\b(?=\W*(?:[,.!]|$))|\b(?:it|that|this|answer|result"
    r"|all)\b(?:['’]s| \w+){1,2}? (?:right|correct|fine|ok|good|consistent|valid)\b|\b(?:stands|checks? out|holds"
    r"|confirmed|verified)\b|没错|(?<!不)正确(?!答|的|选)|无误|[✓✔✅]|\bas (?:required|expected|given|desired|needed"
    r"|claimed)\b|\b(?:it|that|this|all) (?:works|matches|agrees)\b",
)
