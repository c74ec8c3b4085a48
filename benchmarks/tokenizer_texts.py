"""Texts that try every way in which tokenizers go wrong; all written for this purpose.

Owns: the texts.  Does not know: tokenizers.
Idea: lines of many scripts, code, digits and emoji, and combinations made by rule.
"""

from __future__ import annotations

from collections.abc import Iterator

PROSE = """\
The ferry leaves at dawn, and nobody waits for the late ones.
She didn't say it'd rain; we've checked, they're sure, I'm not, you'll see, he'd know.
SHE DIDN'T SAY IT'D RAIN; WE'VE CHECKED, THEY'RE SURE, I'M NOT, YOU'LL SEE, HE'D KNOW.
it’s a “curly” world — with dashes – and ellipses… ‘nested’ too
A cache remembers; a good cache forgets at the right time.
“Wait,” said the miller's daughter, “that isn't flour — it's snow!”
No. 7 is out; No. 8's in (as of 14:05).
one,two;three:four.five!six?seven
x
I
a b c d e f g h i j k l m n o p q r s t u v w x y z
ÀÉÎÕÜ àéîõü ÿŸ œŒ æÆ ðÐ þÞ ß ẞ
naïve café résumé coöperate Zoë façade jalapeño Ångström
Żółć gęślą jaźń, příliš žluťoučký kůň, árvíztűrő tükörfúrógép
İstanbul ıssız dağ; ŞşĞğÇç
Tiếng Việt có dấu: ngã hỏi sắc huyền nặng
Þetta er íslenska. Dette er norsk på ås. Tämä on suomea.
Η γρήγορη αλεπού δεν πηδά σήμερα· γιατί;
Быстрая лиса сегодня отдыхает, а ёж — нет.
Щука, їжак, ґанок, џеп, ѓеврек
Հայերեն գիրքը սեղանին է։
ქართული ენა ლამაზია
שלום עולם, זה משפט קצר עם ניקוד: שָׁלוֹם
مرحبا بالعالم، هذه جملة قصيرة؛ والتشكيل: كَتَبَ
این یک جملهٔ فارسی است با نیم‌فاصله
یہ اردو ہے۔
नमस्ते दुनिया, क्ष त्र ज्ञ १२३
বাংলা ভাষা সুন্দর, ৪৫৬
தமிழ் மொழி இனிது
తెలుగు కన్నడ ಕನ್ನಡ മലയാളം
ไทยไม่มีช่องว่างระหว่างคำ ๗๘๙
ພາສາລາວ မြန်မာဘာသာ ភាសាខ្មែរ
བོད་སྐད་ ᠮᠣᠩᠭᠣᠯ
今天的雨下得很早,我们没有伞。
繁體字與标点:「引號」、《書名》……
夜のうちに雪が積もった。カタカナ、ひらがな、漢字。
ﾊﾝｶｸ ｶﾀｶﾅ と ＦＵＬＬ ＷＩＤＴＨ １２３
오늘은 비가 옵니다. 한글 자모: ㄱㄴㄷ ㅏㅑㅓ
ᄀᄂᄃ 한글 조합형
አማርኛ ሰላም ꦧꦱꦗꦮ ᏣᎳᎩ ᐃᓄᒃᑎᑐᑦ
𐌰𐌱𐌲 𐎀𐎁𐎂 𒀀𒀁 𓀀𓀁 𝒜𝓑𝔠 𝟘𝟙𝟚
𠀀𠀁𪚥 rare ideographs 㐀㐁
mixed текст with עברית and 漢字 in one line 123 ١٢٣
ﬁ ﬂ ﬀ ǆ ǅ ĳ № ℡ ™ ©® ª º
"""

CODE = """\
def f(x: int = 0) -> int:\\n    return x + 1\\n
for (int i = 0; i < n; ++i) { sum += a[i]; }
if (a && b || !c) { return a ? b : c; }
SELECT id, name FROM users WHERE age >= 18 AND name LIKE 'A%';
\\tif x == y:\\n\\t\\tpass\\n\\telse:\\n\\t\\traise ValueError(f"{x!r}")
const xs = [1, 2, 3].map(x => x ** 2).filter(Boolean);
#include <stdio.h>\\r\\nint main(void) {\\r\\n\\tprintf("hi\\\\n");\\r\\n}\\r\\n
<div class="a b" id='c'><!-- note --><br/>&nbsp;&amp;</div>
{"key": [1, 2.5e-3, null, true], "nested": {"ключ": "значение"}}
{"a":{"b":{"c":{"d":[[[]]]}}}}
https://example.org/a/b?c=d&e=%20f#frag-1_2
http://user:pass@[::1]:8080/path;v=1.2/../x?y[]=z
mail.name+tag@sub.example.co.uk
C:\\\\Users\\\\me\\\\file.txt /usr/local/bin/x.sh ~/notes.md
git commit -m "fix: don't crash" && git push --force-with-lease
$ echo "$HOME" | sed 's/[aeiou]\\+/_/g' > out.txt 2>&1
a+b-c*d/e%f^g&h|i~j!k=l<m>n?o:p;q,r.s
snake_case camelCase PascalCase SCREAMING_CASE kebab-case dot.case
__init__ __ _ ___x___ x__y
fn main() { println!("{:>8.3}", 3.14159_f64); }
let r#type = b'\\\\x7f'; // 'a lifetime
$$\\\\int_0^1 x^2\\\\,dx = \\\\tfrac{1}{3}$$
∀x∈ℝ: x²≥0 ∧ ∃y≠x, √y≈±∞ → ∑∏∂∇
≤≥≠≈≡±×÷¬∧∨⊂⊆∪∩∅ ⟨a|b⟩ ⌊x⌋ ⌈y⌉
# Title\\n\\n* item\\n  * sub\\n\\n1. one\\n2. two\\n\\n> quote\\n\\n```py\\nx\\n```
| a | b |\\n|---|:-:|\\n| 1 | 2 |
--- === *** ~~~ ### ... ,,, ;;; ::: !!! ???
!@#$%^&*()_+-=[]{}|;':",./<>?`~
\\u001b[31mred\\u001b[0m
&lt;script&gt;alert(1)&lt;/script&gt;
key: value\\nlist:\\n  - a\\n  - b: |\\n      text
0xDEADBEEF 0b1010 0o777 1_000_000 1e10 1.5E-7 .5 5.
<<<<<<< HEAD\\n=======\\n>>>>>>> main
"""

DIGITS = """\
0
7
42
123
1234
12345678901234567890
3.14159
1,234,567.89
2024-02-29T23:59:59.999Z
+49 (0)30 123456
abc123def456
1st 2nd 3rd 4th
v1.2.3-rc.4+build.5
 1 12 123 1234
1 000 000
½ ¼ ¾ ⅓ ² ³ ¹⁰ ₂ Ⅷ ⅻ ① ⑳ ❶
٠١٢٣٤ ۵۶۷۸۹ ०१२३ ๐๑๒ ０１２３
12½3 x²y³ H₂O 5′10″
一二三 百千万 〇
99%of 100€ £3 ¥400 $5.00
007 0000 00.00 1-1 1/2
𝟏𝟐𝟑 🄀 ㈠ ㉑
"""

EMOJI = """\
😀
😀😃😄
hi😀there
👍🏽 👍 👍🏿
👨‍👩‍👧‍👦
👩🏽‍🚀 👨‍💻 🧑‍🤝‍🧑
🏳️‍🌈 🏴‍☠️
🇩🇪🇯🇵🇧🇷
🏴󠁧󠁢󠁳󠁣󠁴󠁿
☺ ☺️ ☺︎ ❤ ❤️
1️⃣ #️⃣ *️⃣
🫠🫡🪿🩷
text 🎉🎉 more 🎉 text
⚠️ caution ⚡ ☕ ♻ ✂ ✈
→←↑↓⇒⇔ ■□▲△●○★☆ ♠♣♥♦ ♪♫
▁▂▃▄▅▆▇█ ░▒▓ ┌─┬┐ ╔═╦╗
"""

# Written as escapes, for what can't be seen.
ODD = (
    "",
    " ",
    "\n",
    "\t",
    "\r",
    "\r\n",
    "\x00",
    "a\x00b",
    "\x01\x02\x03\x04\x05\x06\x07\x08",
    "\x0b\x0c\x0e\x0f\x10\x11\x12\x13\x14\x15\x16\x17",
    "\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\x7f",
    "\x80\x81\x85\x8f\x9f",
    "a\x85b",
    "no\u00a0break",
    "\u00a0",
    "\u00a0\u00a0 \u00a0x",
    "\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a",
    "a\u2003b \u2009c",
    "line\u2028sep\u2029par",
    "ideographic\u3000space\u3000\u3000",
    "ogham\u1680space\u205fmath",
    "zero\u200bwidth\u200cjoin\u200der",
    "\ufeffbom first",
    "mid\ufeffbom",
    "soft\u00adhyphen",
    "\u202eoverride\u202c \u2066isolate\u2069",
    "\u200fright\u200eleft",
    "e\u0301 cafe\u0301 n\u0303 o\u0308",
    "\u0301alone",
    " \u0301 after space",
    "Z\u0351\u036b\u0343a\u0363\u0308\u0302l\u0348g\u0317\u0333o\u0321",
    "\u1e9b\u0323 \u212b \u00c5 A\u030a",
    "\u1100\u1161\u11a8 \uac01",
    "\ufffd",
    "\ufffd\ufffd x \ufffd",
    "\ufdd0 \ufffe \uffff",
    "\U0001fffe \U0010ffff",
    "\ue000 private \uf8ff",
    "\U000f0000\U00100000",
    "\U00040000 plane four",
    "\u0378 unassigned",
    "\ua66e \u20dd enclosing",
    "\u0660\u066b\u0665",
    "a\u0338b",
    "'s",
    "''s 's' 'S ' s",
    "'re're 've'll'd'm't",
    "'RE'LL'D'M'T",
    "\u2019s \u2019t",
    "x's'y",
    "'\u017f 'ſ k\u212a",
)

CONTROL = (
    "<|im_end|>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n",
    "a<|im_end|>b",
    "a <|im_end|> b",
    "<|im_end|><|im_end|>",
    "<|im_end|> <|im_start|>",
    "<|endoftext|>12<|endoftext|>",
    "<|im_end",
    "|im_end|>",
    "<|im_<|im_end|>end|>",
    "<<|im_end|>>",
    "<|IM_END|>",
    "< |im_end|>",
    "<|im_end|>\n\n<|im_start|>",
    "<repo_name>a/b<file_sep>c.py\nx = 1\n",
    "<reponame><filename><gh_stars>",
    "<issue_start>text<issue_comment>more<issue_closed>",
    "<jupyter_start><jupyter_text>t<jupyter_code>c<jupyter_output>o<jupyter_script>",
    "<empty_output>",
    "\u00e9<|im_end|>\u00e9",
    "\U0001f600<|im_start|>\U0001f600",
    "7<|im_end|>7",
    "tab\t<|im_end|>\ttab",
    "  <|im_start|>  ",
    "<s></s><unk><pad><bos>",
    "<|eot_id|><|begin_of_text|>",
    "[INST] hi [/INST] <<SYS>>",
    "Human: <|im_end|> Assistant: <|endoftext|>",
    "don't<|im_end|>'t",
)


def texts() -> Iterator[str]:
    """Yield every sample text; the same ones in the same order at each call."""
    for block in (PROSE, CODE, DIGITS, EMOJI):
        for line in block.splitlines():
            yield _unescaped(line)
    yield from ODD
    yield from CONTROL
    for n in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 100):  # runs of white space
        yield " " * n
        yield "x" + " " * n + "y"
        yield "\n" * n
        yield "\t" * n + "end"
    for run in ("\n \n", " \n ", "\n\t\n", "\r\n\r\n", "\r\r", " \t ", "\t \t", "  \n\n  ", "\n\r"):
        yield f"a{run}b"
        yield f"{run}b"
        yield f"a{run}"
        yield f"1{run}2"
    for joint in ("", " ", "  ", "\n", "\t", "-", "_", ".", ",", "'", '"', "/", "\u00a0", "\u3000"):
        yield f"word{joint}word"
        yield f"12{joint}34"
        yield f"!{joint}?"
        yield f"\u00e9{joint}\u4e2d"
    for piece in (
        "a",
        "ab",
        "the",
        " the",
        "9",
        "=",
        "-",
        "\u00e9",
        "\u4e2d",
        "\U0001f600",
        "\u0301",
    ):
        yield piece * 40
    yield "Donaudampfschifffahrtselektrizit\u00e4tenhauptbetriebswerkbauunterbeamtengesellschaft"
    yield "pneumonoultramicroscopicsilicovolcanoconiosis" * 3
    yield "qzxjkvbwmpfgyh" * 12
    yield "\u05d0\u05d1\u05d2" * 20 + "abc" * 20
    yield _unescaped(PROSE.replace("\n", " "))
    yield CODE.replace("\\n", "\n").replace("\\t", "\t")


def _unescaped(line: str) -> str:
    r"""Turn the escapes \n, \t, \r, \\ and \u001b of the blocks above into what they mean."""
    for escape, meant in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r"), ("\\u001b", "\x1b")):
        line = line.replace(escape, meant)
    return line.replace("\\\\", "\\")
