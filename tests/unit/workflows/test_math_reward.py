from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonl_math
import pytest

from areal_sc.errors import ConfigError
from areal_sc.workflows.math_reward import check_answers, exact_match, numeric_match

RIGHT = [
    # plain numbers
    ("42", "42"),
    ("42", "The answer is 42."),
    ("42", "42.0"),
    ("1000", "1,000"),
    ("1234567.5", "it costs $1,234,567.50 in all"),
    ("1234", r"\boxed{1{,}234}"),
    ("1234", r"1\,234"),
    ("-7", "\N{MINUS SIGN}7"),
    ("-7", "x = -7"),
    ("0", "0.0"),
    (".5", "0.5"),
    (1000, "1,000"),
    # where the answer stands
    ("4", "First 3, then 4"),
    ("7", "I have 3 apples and buy 4 more, so 3 + 4 = 7."),
    ("5", "I saw 4 apples; so the answer is 5"),
    ("8", "so 3 + 4 = 7\n#### 8 apples, not 9"),
    ("5", r"\boxed{5} and later 6"),
    ("1/2", r"\boxed{1} no, \boxed{\frac{1}{2}}"),
    ("... #### 18", "she makes $18 every day"),
    (r"We get $x^2 = 4$, so \boxed{2}.", "**Answer:** $2$"),
    ("5", "The final answer is: $\\boxed{5}$. I hope it is correct."),
    ("5", "The answer is 5, because 2 + 3 = 5."),
    ("5", "### Final Answer\n\n**5**"),
    ("3", "Therefore,\n\\[\nx = 3\n\\]"),
    ("72", "Natalia sold 72 clips altogether."),
    ("50", "This makes a total of 50."),
    ("50", "The answer is a total of 50 apples."),
    ("5", "It is not 6 but 5."),
    ("5", "It turns out to be 5."),
    ("5", "So 6 cannot be, and the result is 5, which is not even."),
    # fractions, mixed numbers
    (r"\frac12", "1/2"),
    (r"\frac{1}{2}", r"\dfrac{1}{2}"),
    ("1/2", "0.5"),
    ("1/2", "\N{VULGAR FRACTION ONE HALF}"),
    ("-3/4", r"so x is -\dfrac{3}{4}."),
    ("7/2", r"3\frac{1}{2}"),
    ("7/2", "3 1/2"),
    ("-3.5", r"-3\frac12"),
    ("0.333333333", "1/3"),
    ("1/3", "0.333333"),
    # powers, roots, scientific notation, constants
    ("2^3", "8"),
    ("8", "2^3"),
    ("1024", "2^10"),
    (r"\sqrt{2}", r"\frac{2}{\sqrt{2}}"),
    (r"\sqrt2", "sqrt(2)"),
    (r"\sqrt{2}", "\N{SQUARE ROOT}2"),
    (r"\sqrt{2}", "1.414214"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    ("0.002", "2e-3"),
    ("2e-3", r"2 \times 10^{-3}"),
    (r"\frac{\pi}{2}", "pi/2"),
    (r"2\pi", "2\N{GREEK SMALL LETTER PI}"),
    ("3000000", "3 million"),
    (r"\log_2 8", "3"),
    # percent
    ("50", "50%"),
    ("50%", r"50\%"),
    ("50%", "0.5"),
    ("0.5", "50 percent"),
    ("1", "100%"),
    ("12.5", r"\boxed{12.5\%}"),
    # units
    ("5 cm", "5 cm"),
    ("5 cm", "5cm"),
    ("5 cm", "The length is 5 centimeters."),
    (r"5\text{ m}", "5 m"),
    ("5", r"5\,\mathrm{km/h}"),
    ("5 km/h", "5 kilometers per hour"),
    ("9 m^2", "9 square meters"),
    ("$18", "18 dollars"),
    (r"\$18", "$18"),
    ("18", r"\$18.00"),
    ("90", r"90^\circ"),
    (r"90^\circ", "90 degrees"),
    (r"90^{\circ}", "90\N{DEGREE SIGN}"),
    # tuples, intervals, sets, lists
    ("(3, 4)", "(3,4)"),
    (r"\left(3, \frac{1}{2}\right)", "(3, 0.5)"),
    ("(3, 4)", "The answer is (x, y) = (3, 4)."),
    ("[1, 2)", "x \\in [1,2)"),
    (r"(-\infty, 2)\cup(3, \infty)", r"(-\infty,2) \cup (3,+\infty)"),
    ("(1,2)", "1 < x < 2"),
    (r"\{1, 2\}", r"\{2, 1\}"),
    ("1, 2", "2 and 1"),
    ("1, 2", "x = 1 or x = 2"),
    (r"\pm 3", "3, -3"),
    # expressions
    ("x^2+2x+1", "(x+1)^2"),
    ("y = 2x+3", "2x + 3"),
    ("y = 2x+3", "2x - y + 3 = 0"),
    ("x = 5", "5"),
    ("5", "x = 5"),
    ("3+2i", "2i + 3"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    # words
    ("Monday", "The answer is Monday."),
    (r"\text{even}", "Even"),
    ("(B)", r"\boxed{\text{B}}"),
    ("yes", "Yes."),
    # too large to be computed, but the same
    ("9^{9^{9}}", r"\boxed{9^{9^9}}"),
    # as models and datasets write them
    ("18", "So she makes 9 * 2 = $18 every day at the farmer's market.\n#### 18"),
    ("18", "Therefore, Janet makes $<<9*2=18>>18 every day.\n#### 18"),
    ("70000", "He made a profit of $200,000 - $130,000 = $70,000."),
    ("540", "He runs 3*180 = 540 meters a week."),
    ("20", r"The answer is \boxed{20} cups."),
    ("64", "**Final Answer:** Kylar needs to pay $64 for the glasses."),
    ("260", "So, Carla takes a total of 40 + 20 + 100 = 160 minutes. Wait: 260 minutes."),
    ("160", "Answer: 160 minutes"),
    ("45", r"Answer: $\boxed{45}$ miles"),
    (r"\frac{3}{4}", r"$\frac{3}{4}$"),
    (r"\frac{3}{4}", r"The probability is $\frac{3}{4}$."),
    (r"\frac{3}{4}", r"\[ \boxed{\frac{3}{4}} \]"),
    ("3/4", r"\boxed{\frac34}"),
    ("3/4", "75%"),
    ("14", r"Thus, the sum is $5 + 9 = \boxed{14}$."),
    ("p - q", r"\boxed{p-q}"),
    (
        r"\left( 3, \frac{\pi}{2} \right)",
        r"The polar coordinates are $\boxed{\left( 3, \frac{\pi}{2} \right)}$.",
    ),
    ("10,15", "15, 10"),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}"),
    ("Evelyn", r"\boxed{Evelyn}"),
    (r"\text{(C)}", r"\boxed{C}"),
    (r"\text{(C)}", "The answer is (C)."),
    (r"x \in [-2,7]", "[-2, 7]"),
    ("[-2,7]", r"\boxed{-2 \le x \le 7}"),
    (r"-2 \le x \le 7", r"\boxed{[-2,7]}"),
    (r"(-\infty, 5]", r"x \le 5"),
    (r"x \le 5", r"x \leq 5"),
    (r"x \le 5", r"5 \ge x"),
    ("1,-2", "x = 1 or x = -2"),
    ("2516_8", "2516_8"),
    ("2516_8", r"\boxed{2516_{8}}"),
    ("12", r"\boxed{12m²}"),
    ("12 m^2", "12m²"),
    ("12m²", r"\boxed{12\text{ m}^2}"),
    ("1000.99", r"\boxed{1000.99m²}"),
    ("5", r"\boxed{5m/s²}"),
    ("12m", r"\boxed{12m}"),
    ("58,500", "58500"),
    ("58,500", r"\$58,500"),
    (r"32,\!000", "32000"),
    (r"3\sqrt{13}", r"3 \sqrt {13}"),
    (r"3\sqrt{13}", "3√13"),
    ("6 - 5i", "-5i+6"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
    (r"\frac{270}7\text{ degrees}", r"\boxed{\frac{270}{7}^\circ}"),
    (r"5.4 \text{ cents}", "5.4"),
    (r"11\sqrt2", r"\boxed{11\sqrt{2}}"),
    (r"\frac{1}{2}x + 3", "x/2 + 3"),
    (r"4.5\%", "4.5%"),
    ("6+9i", "6 + 9i"),
    (
        r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}",
        r"\boxed{\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}}",
    ),
    ("2x^2 + 3x - 1", "3x + 2x^2 - 1"),
    ("x=5", "x = 5"),
    ("3:2", "3:2"),
    (r"12\text{ inches}", "12 in"),
    (r"\sin x", r"\sin(x)"),
    (r"\frac{\sqrt{3}}{2}", r"\sin(60^\circ)"),
    (r"\emptyset", r"\emptyset"),
    (r"(2,\infty)", r"(2, \infty)"),
    (r"10\text{ m/s}^2", "10 m/s^2"),
    ("1.5", "1.50"),
    ("0.25", "1/4"),
    ("7", "seven: 7"),
    ("100", "10^2"),
    ("5", "<answer>5</answer>"),
    ("5", "<think>maybe 3 or 4</think> <answer> 5 </answer>"),
    ("5", "Final answer: 5"),
    ("5", "Answer = 5"),
    ("5", "The answer to this problem is 5."),
    ("5", "the answer is: $5$."),
    ("5", r"The final answer is $\boxed{5}$."),
    ("5", "So the answer is\n\n5"),
    ("2", r"$$\boxed{2}$$"),
    ("120", "5!"),
    ("x^2", "x*x"),
    ("-1", r"\boxed{-1}"),
    ("1.2e3", "1200"),
    (r"3 \times 10^8", "3e8"),
    (r"3 \times 10^8", "3\N{MULTIPLICATION SIGN}10\N{SUPERSCRIPT EIGHT}"),
    ("0.003", "3\N{MULTIPLICATION SIGN}10\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT THREE}"),
    (r"3 \times 10^8 \text{ m/s}", r"3 \times 10^8 m/s"),
    ("-5", "-(5)"),
    ("5", "|-5|"),
    ("A", "A"),
    (r"\{1\}", "1"),
    ("(1,2),(3,4)", "(3,4) and (1,2)"),
    ("120", r"\boxed{5!}"),
    ("4", "<answer>4</answer>"),
    ("5", "<answer>\n5\n</answer>"),
    ("5", "<answer>\n\\boxed{5}\n</answer>"),
    ("5", "The answer is therefore 5."),
    ("5", "The answer is approximately 5."),
    ("5", "Answer: x=5"),
    # one way to write each thing
    ("3/2", r"\boxed{\dfrac32}"),
    ("3/2", r"\boxed{\tfrac32}"),
    ("3/2", r"\boxed{\cfrac32}"),
    (r"\{1,2\}", r"\boxed{\lbrace 1, 2\rbrace}"),
    ("5", r"The answer is \[5\]"),
    ("5", "The answer is `5`."),
    ("5 cm", "The answer is **5** cm."),
    (r"(-\infty, 5]", r"\boxed{x \leq 5}"),
    (r"(-\infty, 5]", r"\boxed{x \leqslant 5}"),
    (r"[5,\infty)", r"\boxed{x \geq 5}"),
    (r"[5,\infty)", r"\boxed{x \geqslant 5}"),
    (r"x \ne 5", r"\boxed{x \neq 5}"),
    (r"\infty", r"\boxed{infinity}"),
    (r"(1,\infty)", r"\boxed{(1, inf)}"),
    ("-5", "The answer is minus 5"),
    ("-5", "The answer is negative 5"),
    (r"3\sqrt{2}", "The answer is 3sqrt{2}"),
    (r"\frac{1}{12}", r"\boxed{\frac1{12}}"),
    (r"\frac{a}{12}", r"\boxed{\frac a{12}}"),
    (r"\frac{a}{b}", r"\boxed{\frac ab}"),
    (r"\frac{12}{b}", r"\boxed{\frac{12} b}"),
    (r"\sqrt{x}", r"\boxed{\sqrt x}"),
    (r"\sqrt{x}", r"\boxed{sqrt x}"),
    ("8", "The answer is 2**3"),
    ("2^{x+1}", r"\boxed{2^(x+1)}"),
    ("1/8", r"\boxed{2^-3}"),
    ("1234567", r"\boxed{1 234 567}"),
    ("1234.5", "The answer is 1 234.5"),
    ("-0.1", r"\boxed{-.1}"),
    ("500", r"\boxed{.5e3}"),
    ("1-x", "\\boxed{1\N{MINUS SIGN}x}"),
    ("1-x", "\\boxed{1\N{EN DASH}x}"),
    ("6", "The answer is 2×3"),  # noqa: RUF001
    ("6", "The answer is 2\N{MIDDLE DOT}3"),
    ("6", "The answer is 2\N{DOT OPERATOR}3"),
    (r"2\pi", "The answer is 2π"),
    (r"\infty", r"\boxed{∞}"),
    (r"(-\infty, 2]", r"\boxed{x ≤ 2}"),
    (r"[2, \infty)", r"\boxed{x ≥ 2}"),
    (r"x \ne 2", r"\boxed{x ≠ 2}"),
    ("0.25", "The answer is ¼"),
    ("1.75", "The answer is 1¾"),
    ("1/3", r"\boxed{⅓}"),
    ("2/3", r"\boxed{⅔}"),
    ("2,-2", r"\boxed{±2}"),
    (r"[0,1]\cup[2,3]", r"\boxed{[0,1]∪[2,3]}"),  # noqa: RUF001
    ("[0,1]", r"\boxed{x ∈ [0,1]}"),
    ("90°", "The answer is 90°"),
    ("3.14", "The answer is ≈ 3.14"),
    ("2", "The answer is 8÷4"),
    ("2 billion", "The answer is 2000000000"),
    ("2 trillion", "The answer is 2000000000000"),
    ("9 sq ft", "The answer is 9 square feet"),
    ("9 cu ft", "The answer is 9 cubic feet"),
    ("9 ft^3", "The answer is 9 cubic feet"),
    ("109", "Answer: She needs 109 more points."),
    ("3", "It takes 3 hours to fill the tank."),
    ("15", "She earns $15 per hour."),
    ("3/8", r"\boxed{⅜}"),
    ("2", r"\fbox{2}"),
    (r"\sqrt{2}/4", r"\boxed{\frac{\sqrt{\frac{1}{\frac{1}{2}}}}{4}}"),
    (r"\{1\}", r"so it is \boxed{\{ 1 \}} in all"),
]

WRONG = [
    ("10_{2}", "10"),  # it is 2
    ("10", r"\boxed{10_{2}}"),
    ("10_{8}", "10_{2}"),
    ("12 m^2", r"\boxed{12m}"),
    ("12", r"\boxed{12m}"),  # a variable
    ("1, 1, 2", "1, 2, 2"),
    ("2^3", "3"),
    ("2^3", "2"),
    ("2^3", "6"),
    (r"\sqrt{2}", "2"),
    (r"\sqrt{2}", "1.414"),
    ("(3, 4)", "4"),
    ("(3, 4)", "3, 4, 5"),
    ("4", "(3, 4)"),
    (r"\frac12", "12"),
    (r"\frac12", "2"),
    ("12", r"\frac12"),
    ("2", r"x^2"),
    ("100", "100.1"),
    ("1/3", "0.333"),
    ("1/3", "0.3333333334"),
    ("1/3", "3"),
    ("1000000", "1000001"),
    ("0.0000001", "0.0000002"),
    ("10^{-20}", "10^{-30}"),
    ("123456789012345678901", "123456789012345678902"),
    ("1.0000000001", "1"),
    # several candidates
    ("4", "3, 4 or 5"),
    ("5", "3, 4 or 5"),
    ("5", "The answer is either 4 or 5."),
    ("4", "I saw 4 apples; so the answer is 5"),
    ("9", "#### 8 apples, not 9"),
    ("4", "The answer is not 4 but 5."),
    ("5", "The answer is less than 5."),
    ("6", r"\boxed{5} and later 6"),
    ("1", r"\boxed{1} no, \boxed{2}"),
    ("4", r"\boxed{3} or \boxed{4}"),
    ("3", "3, 4"),
    ("4", r"\boxed{4} Wait. The answer is 5."),
    ("7", "10-7"),
    ("5", "5 or more"),
    ("10", "5 to 10"),
    ("4", "between 3 and 4"),
    ("5", "It is not 5"),
    ("5", "It can't be 5"),
    ("5", "It is not equal to 5."),
    ("5", "any number but 5"),
    ("5", "up to 5"),
    ("5", "twice 5"),
    ("5", "the square root of 5"),
    ("5", "5 is wrong"),
    ("5", "5 does not work"),
    # nothing
    ("5", ""),
    ("5", "I do not know"),
    ("5", r"\boxed{}"),
    ("5", "####"),
    ("5", "The answer is"),
    ("0", ""),
    # mixed numbers, signs, powers of ten
    ("7/2", "3/2"),
    ("3/2", r"3\frac{1}{2}"),
    ("3 1/2", "3"),
    ("-7", "7"),
    ("7", "-7"),
    ("5", "5 thousand"),
    ("2", "2e5"),
    ("5", "2e5"),
    ("1234", "1,2,3,4"),
    ("1234", "1, 234"),
    # percent
    ("50", "0.5"),
    ("0.5", "0.5%"),
    ("50%", "5"),
    ("1", "1%"),
    # units
    ("5 cm", "5 m"),
    ("5 m", "5 m^2"),
    ("5 m", "5 m/s"),
    ("$18", "18 euros"),
    ("5 apples", "5 oranges"),
    (r"90^\circ", "90 rad"),
    ("100_2", "100_3"),
    ("5", "5x"),
    ("2", "2h"),
    # tuples, intervals, sets
    ("(3, 4)", "(4, 3)"),
    ("(3, 4)", r"\{3, 4\}"),
    ("(3, 4)", "[3, 4]"),
    ("[1, 2)", "(1, 2]"),
    ("(4, 3)", "(5, 2)"),
    ("(1, 2)", "(1, 3)"),
    ("2, 2, 3", "2, 3"),
    (r"\{1, 2\}", r"\{1, 2, 3\}"),
    ("(1,234)", "1234"),
    (r"(-\infty, 2)\cup(3, \infty)", r"(-\infty, 2)"),
    (r"\pm 3", "3"),
    # expressions
    ("x = 5", "y = 5"),
    ("5", "2x = 5"),
    ("x^2+1", "x^2-1"),
    ("x^2 + 1 = 0", "x^2 + 4 = 0"),
    ("2x", "2"),
    ("x", "y"),
    (r"2\pi", "2"),
    (r"2\pi r h", r"2\pi r"),
    (r"\pi", "3.14"),
    ("i", "1"),
    # what is no number
    ("5", "1/0"),
    ("5", "1e999999999"),
    ("5", r"\frac{5}{"),
    ("5", "((((5"),
    ("5", "NaN"),
    (r"\infty", r"-\infty"),
    ("3.5", "3.5.1"),
    # words
    ("Monday", "The answer is Tuesday."),
    ("even", "not even"),
    ("(B)", "(C)"),
    ("no", "yes"),
    ("Monday", ""),
    # too large to be computed
    ("9", "9^{9^{9^{9}}}"),
    ("9^{9^{9}}", "9^{9^{8}}"),
    ("9", "9^9^9^9^9^9^9^9^9^9^9^9^9"),
    # near misses
    ("14", "Thus $x+y = 5 + 9 = 14$."),
    (
        r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}",
        r"\boxed{\begin{pmatrix} -1 & 0 \\ 0 & 1 \end{pmatrix}}",
    ),
    ("4", "<think>maybe 3 or 4</think> <answer> 5 </answer>"),
    ("4", "The answer is 3 or 4"),
    ("3", "The answer is 3 or 4"),
    ("5", r"\boxed{4, 5}"),
    ("5", r"\boxed{4} \boxed{5}"),
    ("4", r"\boxed{4} and \boxed{5}"),
    ("5", "5 apples and 3 oranges"),
    ("5", "5/3"),
    ("3", "5/3"),
    ("5", "5^2"),
    ("2", "5^2"),
    ("2", r"\log_2 5"),
    ("5", r"\log_2 5"),
    ("3", r"\sqrt[3]{5}"),
    ("3", "10/3"),
    ("3", "3.7"),
    ("3", "3,7"),
    ("5", "|5 - 10| + 1"),
    ("5", "-(5)"),
    ("5", "5i"),
    ("5", "5 + x"),
    ("5", "f(5)"),
    ("5", "x_5"),
    ("5", "a_5"),
    ("5", "5th"),
    ("12", "1 2"),
    ("12", "1,2"),
    ("5", "5:30"),
    ("5", "5 km and 300 m"),
    ("5", "approximately 5 or 6"),
    ("5", "the answer is 4. Check: 4 + 1 = 5"),
    ("5", "at least 5"),
    ("5", "more than 5"),
    ("5", "x > 5"),
    ("5", r"x \ge 5"),
    ("x > 5", r"x \ge 5"),
    ("x > 5", "x < 5"),
    ("[1,2]", "1 < x < 2"),
    ("(1,2)", r"1 \le x < 2"),
    ("5", r"5 \pm 1"),
    ("5", r"\pm 5"),
    ("5", "05:00"),
    ("2", r"\frac{1}{2}"),
    ("1", r"\frac{1}{2}"),
    ("0", "1/10"),
    ("10", "1/10"),
    ("6", "3!!"),
    ("A", "B"),
    ("A", "AB"),
    ("yes", "yes and no"),
    ("Monday", "Monday or Tuesday"),
    ("Monday", "not Monday"),
    ("10", "10 percent of 50"),
    ("10", "10% of 50"),
    ("50", "10% of 50"),
    ("50", "It is 10 percent of 50"),
    ("10", "The answer is 10% of 50."),
    ("10", "The answer is 5 out of 10."),
    ("5", "The answer is 5 in 10."),
    ("7", "4 times 7"),
    ("5", "5 minus 2"),
    ("5", "five"),
    ("5", "4.99999999999999999"),
    ("5", "5.0000001"),
    ("10", "0.1 * 10"),
    ("3", "3 1/2"),
    ("1/2", "3 1/2"),
    ("1/2", r"3\frac12"),
    ("3", r"\sqrt{3}"),
    ("3", r"3\sqrt{3}"),
    ("3", "3e"),
    ("3", r"3\pi"),
    ("3", "3k"),
    ("3", "3M"),
    ("(1,2)", "(1,2,3)"),
    ("(1,2,3)", "(1,2)"),
    (r"\{1\}", r"\{1,2\}"),
    ("(1,2)", "(2,1)"),
    ("(1,2),(3,4)", "(1,2)"),
    ("(1,2),(3,4)", "(1,3),(2,4)"),
    ("(0, 1)", "(0, 1]"),
    ("5", r"\boxed{5"),
    ("5", r"\text{5 or 6}"),
    ("5", "answer is 56"),
    ("5", "55"),
    ("5", "5 5"),
    ("5", "5, 5"),
    (r"90^\circ", "90 radians"),
    ("30", r"\sin(30)"),
    ("0", "None"),
    ("0", "O"),
    ("1", "l"),
    ("20", "$20 and $30"),
    ("30", "$20 and $30"),
    ("20", "20-30"),
    ("100", "1e2.5"),
    (r"\pi", "22/7"),
    ("e", "2.718"),
    ("5", "5 hundred"),
    ("5", "5 dozen"),
    ("5", "five hundred 5 hundred"),
    ("5", r"\boxed{5!}"),
    ("5", "\\boxed{x \ne 5}"),
    ("5", "Answer: the product of 4 with 5"),
    ("5", "The answer is the sum of 4 and 5"),
    ("4", "The answer is 4th"),
    ("5", "<answer>4</answer> 5"),
    ("5", "The correct answer is 5!"),
    ("5", "The answer is 5 or 6."),
    ("5", "- 5"),
    ("5", "It isn't 5."),
    ("4", r"\boxed{4} is too small, so \boxed{5"),
]


@pytest.mark.parametrize(("answer", "completion"), RIGHT)
def test_a_right_answer_is_rewarded(answer: str | int, completion: str) -> None:
    assert numeric_match({"answer": answer}, completion) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion", "words"),
    [
        (
            "5",
            r"\boxed{@ 5}",
            "therefore thus hence so simply just exactly equals is are the an a number value "
            "answer result option choice approximately about roughly it be then",
        ),
        (
            "5",
            "So the answer is 5 @ 2 + 3 = 5.",
            "because since as so which when where that if after but not for at on is are was were "
            "has have every each altogether total left hence thus then instead rather remaining he "
            "she they we it",
        ),
        ("5", "#### 5 @", "of in an each every for at altogether total the on"),
        ("x", r"\boxed{\@{x}}", "text mathrm textbf mathbf mbox operatorname rm textit"),
        (r"\@(x)", r"\boxed{@(x)}", "sin cos tan ln log exp"),
        (
            "x^2",
            r"\boxed{@ x^2}",
            r"\displaystyle \limits \left. \big \Big \bigr \Bigr \bigl \Bigl",
        ),
        ("1000", r"\boxed{1@000}", r"\, \; \: {,} {\,}"),
    ],
)
def test_words_around_an_answer_that_change_nothing(
    answer: str, completion: str, words: str
) -> None:
    for word in words.split():
        prompt = {"answer": answer.replace("@", word)}
        assert numeric_match(prompt, completion.replace("@", word)) == 1.0, word


@pytest.mark.parametrize(
    ("completion", "words"),
    [
        (
            r"\boxed{5 @}",
            "squared cubed factorial pairs pair half halves third quarter fourth fifth sixth "
            "eighth tenth hundredth thirds over plus minus times divided point and than out modulo "
            "mod base or",
        ),
        (
            "We see that it is @ 5.",
            "not than least most between from no never except times plus minus by over nor exceeds "
            "below above under before after within without almost nearly twice double mod step "
            "question equation up#to instead#of anything#but not#quite#exactly",
        ),
        (
            "We have the @ of 5.",
            "% 3 percent out half third thirds quarter quarters multiple power root roots square "
            "cube factor factors divisor divisors minimum maximum",
        ),
        (
            "We see that 5 @.",
            "cannot can't isn't wasn't doesn't didn't wouldn't couldn't is#wrong is#incorrect "
            "is#impossible is#invalid is#false was#wrong seems#wrong looks#wrong is#not#right",
        ),
    ],
)
def test_words_around_an_answer_that_make_it_another(completion: str, words: str) -> None:
    for word in words.split():
        said = word.replace("#", " ")
        assert numeric_match({"answer": "5"}, completion.replace("@", said)) == 0.0, said


@pytest.mark.parametrize(("answer", "completion"), WRONG)
def test_no_wrong_answer_is_rewarded(answer: str, completion: str) -> None:
    assert numeric_match({"answer": answer}, completion) == 0.0


def test_reference_answers_that_cannot_be_read_are_named() -> None:
    good = [
        {"answer": answer} for answer in ("3", r"\sqrt{2}", "(1, 2)", "Monday", "... #### 5", 7)
    ]
    check_answers(good)
    bad = [r"\frac{1}{", "x = = 3", "", "5 apples, maybe 6", "5!7?"]
    rows = [*good, *({"answer": answer} for answer in bad), {"question": "?"}]
    with pytest.raises(ConfigError) as caught:
        check_answers(rows)
    message = str(caught.value)
    assert message.startswith("6 reference answers cannot be read:")
    for index, answer in enumerate(bad, start=len(good)):
        assert f"row {index}: the reference answer {answer!r} cannot be parsed" in message
    assert "and 1 more" in message
    with pytest.raises(ConfigError, match="row 0: the row has no 'answer', only \\['question'\\]"):
        check_answers([{"question": "?"}])
    with pytest.raises(ValueError, match="the reference answer '' cannot be parsed"):
        numeric_match({"answer": ""}, "3")


def test_the_example_names_them_before_it_starts(tmp_path: Path) -> None:
    config = Path(jsonl_math.__file__).parents[1] / "configs" / "jsonl_math.yaml"
    dataset = tmp_path / "rows.jsonl"
    answers = ["1", "2", "3 = = 4"]
    dataset.write_text("".join(json.dumps({"prompt": "?", "answer": a}) + "\n" for a in answers))
    settings = [f"run_dir={tmp_path / 'run'}", f"task.dataset={dataset}", "task.num_held_out=1"]
    with pytest.raises(ConfigError, match="row 2: the reference answer '3 = = 4'"):
        jsonl_math.main(["--config", str(config), "actor.path=/none", *settings])
    assert not (tmp_path / "run").exists()


def test_plain_numbers_are_compared_without_sympy() -> None:
    """So the script, which only names the reward and reads references, stays light."""
    program = (
        "import sys\n"
        "from areal_sc.workflows.math_reward import check_answers, numeric_match\n"
        "check_answers([{'answer': '1,234.5'}, {'answer': '-3/4'}, {'answer': 'Monday'}])\n"
        "assert numeric_match({'answer': '5'}, 'The answer is 5 apples.') == 1.0\n"
        "assert not {'sympy', 'math_verify', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_exact_match_ignores_only_white_space_around() -> None:
    assert exact_match({"answer": "a b"}, " a b\n") == 1.0
    assert exact_match({"answer": "a b"}, "ab") == 0.0


@pytest.mark.parametrize("reward", [exact_match, numeric_match])
def test_a_missing_reference_answer_is_no_word(reward: Any) -> None:
    with pytest.raises(ValueError, match="missing"):
        reward({"answer": None}, "None")
    with pytest.raises(ConfigError, match=r"row 0: .* is missing \(null\)"):
        check_answers([{"answer": None}])
