"""Pairs of reference and completion in the formats of the field's data sets and models."""

from __future__ import annotations

import pytest

from areal_sc.sources.reference import reference_of, resolve
from areal_sc.workflows.math_reward import NumericMatch, check_answers, numeric_match

# a line is `reference ⇒ completion`; ⏎ is the end of a line
RIGHT = r"""
\begin{pmatrix} 1 \\ 3 \end{pmatrix} ⇒ It is $\begin{pmatrix} 1 \\ 3 \end{pmatrix}$.
\begin{pmatrix} 1 \\ 3 \end{pmatrix} ⇒ The sum is \begin{pmatrix} 1 \\ 3 \end{pmatrix}.
a(b+c) ⇒ \boxed{ab+ac}
a(b+c) ⇒ \boxed{ab + ac}
11111111100 ⇒ 11,\! 111,\! 111,\! 100
11,\! 111,\! 111,\! 100 ⇒ \boxed{11111111100}
\{1,2\} ⇒ \boxed{{1,2}}
\{1,2\} ⇒ {1,2}
{1,2} ⇒ \{2,1\}
5 ⇒ \boxed{5\textnormal{ miles}}
5\textnormal{ miles} ⇒ 5
5 ⇒ 5$
5 ⇒ The answer is 5$.
34 ⇒ Final Answer: The largest $n$ is 34.
a^2 - b^2 ⇒ \boxed{(a-b)(a+b)}
a/b ⇒ \boxed{\frac{a}{b}}
A \cup B ⇒ \boxed{A \cup B}
A \cup B ⇒ \boxed{A\cup B}
a + b ⇒ \boxed{b+a}
a = 5 ⇒ \boxed{a=5}
a = 5 ⇒ \boxed{5}
A, B ⇒ \boxed{A, B}
A, B ⇒ \boxed{A and B}
A ⇒ \boxed{\text{(A)}}
42 ⇒ <think>\boxed{7}</think>The result is \boxed{42}
42 ⇒ <think>the answer is 7⏎\boxed{7}⏎</think>⏎42
42 ⇒ is 7 \boxed{7}</think>⏎The answer is 42.
42 ⇒ So \boxed{42}.⏎This answer is correct.
42 ⇒ #### 42⏎This answer is correct.
42 ⇒ <answer>42</answer>⏎This answer is correct.
42 ⇒ So \boxed{42}.⏎Please tell me if this answer is helpful!
42 ⇒ #### 42⏎The answer is in euros.
42 ⇒ <answer>42</answer> I think that the answer is clear now.
42 ⇒ The final answer is 42. A check: 40+2=42, so this answer is right.
2, 3 ⇒ $\boxed{2} \quad \text{and} \quad \boxed{3}$
34 ⇒ Final Answer: The final answer is $34$. I hope it is correct.
C ⇒ The answer is C because it is.
C ⇒ The answer is C.
B ⇒ Answer: B
A ⇒ The answer is A.
A ⇒ The correct answer is \textbf{(A)}.
3 ⇒ \boxed{3}\boxed{3}
3 ⇒ \boxed{3}⏎#### 3
x^2-1 ⇒ \boxed{(x-1)(x+1) = x^2 - 1}
1/3 ⇒ \boxed{0.\overline{3}}
0.\overline{3} ⇒ \boxed{\frac13}
-1 ⇒ \boxed{i^2}
\frac{1}{2} ⇒ \boxed{0.5}
x=5 ⇒ \boxed{5}
\frac{3}{4} ⇒ \boxed{3/4}
\$32 ⇒ \boxed{32}
0.5 ⇒ \boxed{.5}
\dfrac{5}{7} ⇒ \boxed{\tfrac{5}{7}}
90^{\circ} ⇒ \boxed{90^\circ}
4\text{ feet} ⇒ \boxed{4}
15\text{ cm}^2 ⇒ \boxed{15\text{ cm}^2}
\begin{pmatrix}-7\\16\\5\end{pmatrix} ⇒ \boxed{\begin{pmatrix} -7 \\ 16 \\ 5 \end{pmatrix}}
\begin{bmatrix}1&2\end{bmatrix} ⇒ \boxed{\begin{pmatrix}1&2\end{pmatrix}}
\text{odd} ⇒ \boxed{odd}
1,2,3 ⇒ \boxed{3,2,1}
-\frac{1}{2} ⇒ \boxed{-\frac12}
1 \pm \sqrt{19} ⇒ \boxed{1-\sqrt{19}, 1+\sqrt{19}}
10{,}000 ⇒ \boxed{10,000}
3.14\cdot 10^5 ⇒ \boxed{314000}
e^{2x} ⇒ \boxed{e^{2 x}}
\log_{10} 100 ⇒ \boxed{2}
(x-2)(x+2) ⇒ \boxed{x^2-4}
\text{(A)} ⇒ \boxed{A}
5\sqrt{2}\text{ cm} ⇒ \boxed{5\sqrt{2}}
36\pi ⇒ \boxed{36\pi\text{ square units}}
-1 + 2i ⇒ \boxed{2i-1}
\binom{10}{3} ⇒ \boxed{120}
2^{10} ⇒ \boxed{1024}
\emptyset ⇒ \boxed{\varnothing}
10:30 ⇒ \boxed{10:30}
y = -2x + 3 ⇒ \boxed{y=3-2x}
x+2y-3=0 ⇒ \boxed{2x+4y=6}
AB ⇒ \boxed{AB}
2\cos x ⇒ \boxed{2\cos(x)}
n(n+1)/2 ⇒ \boxed{\frac{n(n+1)}{2}}
|x-1| ⇒ \boxed{\lvert x-1 \rvert}
\mathbb{R} ⇒ \boxed{(-\infty,\infty)}
a^2b ⇒ \boxed{ba^2}
x<-1 ⇒ \boxed{(-\infty,-1)}
[2,5) ⇒ Final Answer: The final answer is $[2,5)$. I hope it is correct.
\$5 ⇒ Final Answer: The final answer is $\$5$. I hope it is correct.
Natalia sold 48/2 = <<48/2=24>>24 clips in May.⏎#### 72 ⇒ The answer is 72.
#### 10 ⇒ Weng earned $10.
#### 42 ⇒ Julie should read 42 pages.
#### 3 ⇒ It takes 3 bolts in total.
#### 64 ⇒ Kylar needs to pay \$64.
#### 18 ⇒ Janet makes **$18** every day.
#### 18 ⇒ **Answer:** $18 per day
#### 18 ⇒ Answer: **18**
#### 25 ⇒ #### 25%
#### 18 ⇒ So the total is 18 dollars.
#### 18 ⇒ She makes 9 x 2 = 18 dollars.
#### 460 ⇒ Eliza's earnings are \( 400 + 60 = 460 \) dollars.
#### 694 ⇒ Final answer: $694
#### 18 ⇒ ANSWER: 18
204 ⇒ Answer: 204
204 ⇒ **Answer:** 204
33 ⇒ \boxed{033}
116 ⇒ Answer: \(116\)
34 ⇒ Answer: $\boxed{34}$.
204 ⇒ #### Final Answer⏎⏎\boxed{204}
204 ⇒ **Final Answer**⏎⏎\[⏎\boxed{204}⏎\]
5 ⇒ <think>⏎x⏎</think>⏎⏎<answer>⏎\boxed{5}⏎</answer>
5 ⇒ <think>hm</think>⏎⏎**Final Answer:** $\boxed{5}$
5 ⇒ <answer>5 apples</answer>
x+1 ⇒ <answer>x + 1</answer>
\frac{1}{2} ⇒ <answer>\frac{1}{2}</answer>
1,2 ⇒ \boxed{1, 2}
-10 ⇒ $-10$
10 ⇒ The solution is $\boxed{x=10}$
x=1 ⇒ $1$
23 ⇒ 23\%
10^{-5} ⇒ 0.00001
\sqrt{3}/2 ⇒ $\frac{\sqrt3}{2}$
2x+4y+z-19=0 ⇒ $2x+4y+z-19=0$
1000 ⇒ 1 000
4 ⇒ $\boxed{\frac{8}{2}}$
2a ⇒ \boxed{a+a}
x=1,y=2 ⇒ \boxed{x = 1, y = 2}
1 ⇒ \boxed{x_1 = 1}
12.5 ⇒ \boxed{12.50}
True ⇒ \boxed{\text{True}}
\text{no solutions} ⇒ \boxed{no solutions}
5 ⇒ \boxed{\textbf{5}}
5 ⇒ \boxed{ 5 }
5 ⇒ $\boxed 5$
5 ⇒ \fbox{5}
5 ⇒ $$\boxed{5}.$$
5 ⇒ 5⏎
1/2 ⇒ one half, that is 1/2
15 ⇒ \boxed{15\,\text{cm}}
15 ⇒ \boxed{15 \; \text{square units}}
50 ⇒ \boxed{50 \text{ dollars}}
5 ⇒ Thus the value of $x$ is $5$.
5 ⇒ Hence, $f(2) = 5$.
12 ⇒ Thus there are **12** ways.
12 ⇒ The number of ways is $\binom{4}{2} \cdot 2 = 12$.
5 ⇒ \begin{align*} x + 2 &= 7 \\ x &= 5 \end{align*}⏎The answer is 5.
5 ⇒ Therefore, the final answer is:⏎\[⏎\boxed{5}⏎\]⏎⏎Let me know if you have questions!
5 ⇒ $x = \boxed{5}$ cm
5 ⇒ #### 5⏎⏎I hope this answers your question: it was fun.
5 ⇒ **The answer is:** 5
5 ⇒ The answer is $5$ (since $2+3=5$).
5 ⇒ The answer is x=5.
x-1 ⇒ The answer is $x - 1$.
-1 ⇒ The answer is -1.
1/2 ⇒ \boxed{0.5 = \frac12}
3 ⇒ \boxed{\lfloor 3.7 \rfloor}
10 ⇒ \boxed{\dbinom{5}{2}}
8 ⇒ \boxed{2*4}
1/4 ⇒ \boxed{2^{-2}}
4 ⇒ \boxed{\sqrt{16}}
1 ⇒ \boxed{e^0}
5 ⇒ \boxed{+5}
5 ⇒ \boxed{\;5\;}
5 ⇒ \boxed{\displaystyle 5}
5 ⇒ \boxed{\color{red}{5}}
9 ⇒ \boxed{n=9 \text{ ways}}
-2<x<3 ⇒ \boxed{-2 < x < 3}
1.2 \times 10^5 ⇒ \boxed{120000}
120,000 ⇒ \boxed{1.2 \times 10^5}
\frac{\sqrt{3}}{3} ⇒ \boxed{\frac{1}{\sqrt{3}}}
\frac{\sqrt{3}}{3} ⇒ \boxed{\tan 30^\circ}
2\sqrt{5} ⇒ \boxed{\sqrt{20}}
e^2 ⇒ \boxed{e^{2}}
\cos^2 x ⇒ \boxed{1-\sin^2 x}
\frac{1}{x+1} ⇒ \boxed{(x+1)^{-1}}
C ⇒ \boxed{\text{C}}
D ⇒ Answer: D
D ⇒ The correct answer is (D) because of this.
A ⇒ Therefore, the correct option is A.
5 ⇒ </think>⏎\boxed{5}
3 \text{ and } 4 ⇒ \boxed{3, 4}
3,4 ⇒ The numbers are 3 and 4.
1,000 ⇒ \boxed{1000}
3.50 ⇒ \boxed{3.5}
x^2-4 ⇒ \boxed{(x+2)(x-2)}
6\text{ units}^2 ⇒ \boxed{6}
x=\frac{1}{2} ⇒ \boxed{\frac{1}{2}}
12 ⇒ Answer:⏎12
12 ⇒ Our final answer is then 12.
12 ⇒ The answer must be 12
12 ⇒ Hence the answer is $\frac{24}{2} = 12$.
12 ⇒ It equals 12.
12 ⇒ Result: 12
12 ⇒ That is $12$.
12 ⇒ $$12$$
12 ⇒ `12`
\frac{1}{3} ⇒ The probability of this is 1/3.
\frac{1}{3} ⇒ P(A) = 1/3
x^2 + 1 ⇒ f(x) = x^2 + 1
(2, 3) ⇒ The answer is (2, 3).
2, 3 ⇒ The roots are 2 and 3.
2, 3 ⇒ \boxed{x \in \{2, 3\}}
500 ⇒ \$500
500 ⇒ €500
25% ⇒ 25 percent
3 ⇒ \boxed{3\ \text{people}}
45 ⇒ \boxed{45 \text{ degrees}}
B ⇒ (B)
B ⇒ \boxed{(\text{B})}
B ⇒ The correct option is B.
B ⇒ \boxed{B) 42}
yes ⇒ Yes
true ⇒ \boxed{True}
red ⇒ The answer is red.
\frac{x+1}{2} ⇒ \boxed{(x+1)/2}
\log_2 3 ⇒ \boxed{\frac{\ln 3}{\ln 2}}
\frac{4}{3}\pi r^3 ⇒ \boxed{\frac{4\pi r^3}{3}}
-x+3 ⇒ \boxed{3-x}
(-2, 2) ⇒ \boxed{|x| < 2}
x \neq 1 ⇒ \boxed{\mathbb{R} \setminus \{1\}}
30 ⇒ \boxed{30^\circ}
5 ⇒ The answer is 5 (five).
5 ⇒ 5 (five)
(-\infty,-1)\cup(1,\infty) ⇒ \boxed{x < -1 \text{ or } x > 1}
(-\infty,-1)\cup(1,\infty) ⇒ x < -1 or x > 1
x < -1 or x > 1 ⇒ \boxed{(-\infty,-1)\cup(1,\infty)}
(-\infty, 0] \cup [4, \infty) ⇒ $x \le 0$ or $x \ge 4$
\{1,2,3\} ⇒ \boxed{\{1\} \cup \{2,3\}}
-5 ⇒ So the result is negative 5.
5 ⇒ There are 5 negative integers.
5 ⇒ There are 5 cookies left over.
D ⇒ The answer is (D) $\frac{1}{2}$.
C ⇒ The correct answer is C) 42.
5 ⇒ The answer is 5, not 6.
5 ⇒ The answer is 5 because 6 is too large.
5 ⇒ The answer is 5, since $x$ cannot be negative.
7 ⇒ If x = 2, then the result is 7.
3/4 ⇒ The probability that it does not rain is 3/4.
7 ⇒ The number of students who do not play is 7.
12 ⇒ The least common multiple is 12.
3 ⇒ The solution to the equation is $x = 3$.
12 ⇒ The total before tax is $12.
(1,2) ⇒ The lines meet at the point $(1, 2)$.
70000 ⇒ He made a profit of $70,000.
1/6 ⇒ We have a probability of 1/6.
20 ⇒ Solving for $x$ yields $x=1/5$, or $\boxed{20}$ percent.
\boxed{1,-2} ⇒ \[ \boxed{-2} \quad \text{and} \quad \boxed{1}. \]
\text{ellipse} ⇒ The answer is an ellipse.
4.12310562561766 ⇒ $\sqrt{17}$
55 ⇒ \boxed{\sum_{i=1}^{10} i}
\text{(E)} ⇒ The answer is $\boxed{\textbf{(E) }42}$
5 ⇒ \boxed{x+y=5}
\begin{pmatrix}4 & 7\end{pmatrix} ⇒ \boxed{\left[\begin{array}{cc}4 & 7\end{array}\right]}
20517 ⇒ \boxed{20 {, } 517}
8 ⇒ So there are 8 ways. I hope it is correct. <|im_start|>user
8 ⇒ So there are 8 ways.<|im_end|>
5/9 ⇒ $x = 10/18 = 5/9 \approx 0.556$
\{n | n > 7\} ⇒ \boxed{(7, \infty)}
25 ⇒ Here is the result.⏎Answer: 25
0 ⇒ Answer: \boxed{0}
9 ⇒ \boxed{m+n = 9}
9 ⇒ Thus $m+n = 9$.
6 ⇒ \boxed{ab = 6}
3,5,7 ⇒ \boxed{3,5,\text{ and }7}
16 ⇒ so $n=480/30=\boxed{16}$⏎Final Answer: The final answer is $16$. I hope it is correct.
24 ⇒ We have that $\det (\mathbf{A} \mathbf{B}) = (2)(12) = \boxed{24}.$
1200 ⇒ #### 1,200
-5 ⇒ #### -5
\frac{1}{2} ⇒ \boxed{\frac{1}2}
3\sqrt{2} ⇒ \boxed{3\sqrt2}
1+2i ⇒ \boxed{1+2i}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ⇒ \boxed{\begin{bmatrix} 1 \\ 2 \end{bmatrix}}
(-\infty, 3) ⇒ \boxed{(-\infty, 3)}
12 ⇒ \boxed{12 \text{ square units}}
12 ⇒ \boxed{12\text{ cm}^{2}}
12 ⇒ \boxed{12 \, \text{cm}^3}
12 ⇒ \boxed{12~\mathrm{cm}}
\text{True} ⇒ \boxed{\mathrm{True}}
12 ⇒ \boxed{\mathbf{12}}
12 ⇒ \boxed{\bf 12}
12 ⇒ \boxed{\textbf{(B)}\ 12}
\textbf{(B)} ⇒ \boxed{\textbf{(B)}\ 12}
B ⇒ \boxed{\text{(B) } 12}
25 ⇒ The answer: $25.
25 ⇒ ### Final Answer: **25**
25 ⇒ \[\boxed{25}\]<|endoftext|>
25 ⇒ The answer is 25</s>
25 ⇒ The final answer is $\boxed{25}$<|im_end|>
25 ⇒ answer: 25
25 ⇒ **Final answer**: \(25\)
25 ⇒ Therefore, the total is: $$ 25 $$
25 ⇒ So, the value is $\mathbf{25}$.
25 ⇒ <answer> 25 </answer><|im_end|>
1/4 ⇒ \boxed{\dfrac{1}{4}}
\frac{3}{4} ⇒ \boxed{\frac{3}{4} = 0.75}
\frac{2}{3} ⇒ \boxed{\frac{2}{3} \approx 0.667}
2^{2024} ⇒ \boxed{2^{2024}}
\binom{2024}{12} ⇒ \boxed{\binom{2024}{12}}
2k+1 ⇒ \boxed{2k+1, k \in \mathbb{Z}}
\frac{n(n-1)}{2} ⇒ \boxed{\binom{n}{2}}
x^3 + 3x - 6 ⇒ \boxed{p(x) = x^3+3x-6}
60^\circ ⇒ \boxed{60}
8\pi ⇒ \boxed{8 \pi \text{ cm}^2}
4210_{5} ⇒ \boxed{4210_5}
\text{Saturday} ⇒ \boxed{Saturday}
10\% ⇒ \boxed{10\%}
5.5 ⇒ \boxed{5 \frac{1}{2}}
11/2 ⇒ \boxed{5\tfrac{1}{2}}
(2, -1) ⇒ \boxed{x=2, y=-1}
x=2, y=-1 ⇒ \boxed{(2,-1)}
(2, -1) ⇒ The point is $(x, y) = (2, -1)$.
\frac{a+b}{2} ⇒ \boxed{\dfrac{a + b}{2}}
f(x)=2x ⇒ \boxed{f(x) = 2x}
2x ⇒ \boxed{f(x) = 2x}
\sqrt[3]{2} ⇒ \boxed{2^{1/3}}
\frac{1}{\sqrt{2}} ⇒ \boxed{\frac{\sqrt{2}}{2}}
0.1\overline{6} ⇒ \boxed{\frac16}
0.\overline{3} ⇒ \boxed{1/3}
1\frac{4}{5} ⇒ \boxed{1.8}
1e3 ⇒ \boxed{1000}
x \in (-1, 2) ⇒ \boxed{-1 < x < 2}
\{x | x > 2\} ⇒ \boxed{(2, \infty)}
(2, \infty) ⇒ \boxed{\{x \mid x > 2\}}
(2, \infty) ⇒ \boxed{x \in (2, \infty)}
\text{no solution} ⇒ \boxed{\text{No solution}}
\text{(-\infty, 3)} ⇒ \boxed{(-\infty,3)}
3.0 ⇒ \boxed{3}
100,000 ⇒ \boxed{10^5}
3 : 5 ⇒ \boxed{3:5}
\frac{3}{5} ⇒ \boxed{3/5}
7.78 ⇒ It is $\frac{70}{9} \approx 7.78$.
\frac{70}{9} ⇒ \boxed{\frac{70}{9} \approx 7.78}
12 ⇒ \boxed{{\bf 12}}
\frac{\pi}{4} + k\pi ⇒ \boxed{x = \frac{\pi}{4} + k\pi, k \in \mathbb{Z}}
\frac{\pi}{4} + k\pi, k \in \mathbb{Z} ⇒ \boxed{\frac{\pi}{4} + k\pi}
(-1, 2, 3) ⇒ \boxed{a = -1, b = 2, c = 3}
(2, -1) ⇒ $y = -1$ and $x = 2$
(2,\infty) ⇒ \boxed{\{x : x > 2\}}
\left\{x \mid x > 2\right\} ⇒ \boxed{x > 2}
42 ⇒ The answer is (E) 42.
\text{(E) } 42 ⇒ \boxed{42}
34 ⇒ Answer: $34$
34 ⇒ Answer: \boxed{34}
34 ⇒ **Answer**: 34
34 ⇒ Answer: 34 apples
34 ⇒ ####34
34 ⇒ \boxed{34} \text{ cm}
34 ⇒ Answer: x = 34
34 ⇒ Final answer: 34 (thirty-four)
34 ⇒ \[⏎\boxed{34}⏎\]⏎This completes the solution.
34 ⇒ \boxed{34}⏎⏎**Verification:** 30 + 4 = 34, which matches.
34 ⇒ \boxed{34}⏎⏎Note that 33 is not possible.
34 ⇒ \boxed{\text{34}}
34 ⇒ \boxed{\mathrm{34}}
34 ⇒ \boxed{34.}
34 ⇒ Hence we get $n=\boxed{34}$ as desired.
34 ⇒ Thus \fbox{$34$}
34 ⇒ \boxed{$34$}
34 ⇒ \boxed{\(34\)}
34 ⇒ Therefore, the sum of all possible values is 34.
34 ⇒ There are 34 such numbers.
34 ⇒ There are a total of 34.
34 ⇒ Therefore, there are exactly 34 integers with this property.
34 ⇒ Thus the answer is $8+26=34$.
34 ⇒ Therefore, $m+n = 25+9 = \boxed{34}$.
34 ⇒ $$\boxed{34}$$⏎⏎### Explanation⏎We used the identity $a^2 - b^2 = (a-b)(a+b)$.
34 ⇒ The final answer is: 34⏎⏎Let me double check: 17 * 2 = 34. Yes.
34 ⇒ x = 34⏎
34 ⇒ <answer>x = 34</answer>
34 ⇒ <answer>The answer is 34</answer>
34 ⇒ <answer>\(34\)</answer>
34 ⇒ <answer>$34</answer>
34 ⇒ <think>It may be 12.</think>34
34 ⇒ <think>It may be 12.</think>**Answer:** 34
34 ⇒ <|begin_of_thought|>12?<|end_of_thought|><|begin_of_solution|>\boxed{34}<|end_of_solution|>
34 ⇒ ```⏎34⏎```
34 ⇒ Answer⏎34
34 ⇒ $34$ is the answer.
34 ⇒ 34 is the answer.
34 ⇒ Thus, 34 is the final answer.
34 ⇒ $n = 34$ works.
34 ⇒ The number of such pairs is $\binom{4}{2}+28=34$.
34 ⇒ The minimum value is 34.
34 ⇒ The maximum possible area is 34 square units.
34 ⇒ Therefore, Tina has 34 marbles left.
34 ⇒ He needs 34 more minutes.
34 ⇒ She paid $34 in total.
34 ⇒ She paid a total of $34.00.
34 ⇒ So Tom is 34 years old.
34 ⇒ Total = 30 + 4 = 34
34 ⇒ Total: 34 dollars
34 ⇒ 30+4=34 dollars were spent.
34 ⇒ The distance between them is 34 km.
34 ⇒ It is 34 degrees.
1/2 ⇒ \boxed{\frac{1}{2}}
1/2 ⇒ \boxed{1/2}
1/2 ⇒ \boxed{0.50}
\frac{1}{2} ⇒ $P = \frac{3}{6} = \frac{1}{2}$
\frac{1}{2} ⇒ \boxed{\frac{3}{6} = \frac{1}{2}}
\sqrt{3} ⇒ \boxed{x = \sqrt{3}}
x=\sqrt{3} ⇒ \boxed{\sqrt{3}}
2\sqrt{3} ⇒ \boxed{2 \sqrt{3} \approx 3.46}
2\sqrt{3} ⇒ \boxed{3.464101615}
(-\infty,0)\cup(0,\infty) ⇒ \boxed{x \neq 0}
(-\infty,0)\cup(0,\infty) ⇒ \boxed{\mathbb{R} \setminus \{0\}}
(1,3) ⇒ \boxed{x \in (1, 3)}
(1,3) ⇒ \boxed{1<x<3}
x>2 ⇒ \boxed{(2,+\infty)}
\{1,3\} ⇒ \boxed{x=1 \text{ or } x=3}
1,3 ⇒ \boxed{x_1=1, x_2=3}
1,3 ⇒ The solutions are $x = 1$ and $x = 3$.
1,3 ⇒ \boxed{1} and \boxed{3}
1,3 ⇒ \boxed{1 \text{ and } 3}
1,3 ⇒ \boxed{\{1,3\}}
(1,3) ⇒ \boxed{(x,y)=(1,3)}
(1,3) ⇒ \boxed{\langle 1, 3 \rangle}
(1,3) ⇒ \boxed{\left(1,3\right)}
(1,2),(3,4) ⇒ \boxed{(1,2), (3,4)}
(1,2),(3,4) ⇒ \boxed{(3,4),(1,2)}
(1,2),(3,4) ⇒ \boxed{\{(1,2),(3,4)\}}
x^2-5x+6 ⇒ \boxed{(x-2)(x-3)}
(x-2)(x-3) ⇒ \boxed{x^2 - 5x + 6}
f(x)=x+1 ⇒ \boxed{f(x) = x + 1}
f(x)=x+1 ⇒ \boxed{x+1}
y=2x+1 ⇒ \boxed{y = 2x + 1}
\frac{x}{2} ⇒ \boxed{0.5x}
3x^2 ⇒ \boxed{3 \cdot x^2}
\ln 2 ⇒ \boxed{\ln(2)}
\log_2 3 ⇒ \boxed{\log_{2}{3}}
e^{-1} ⇒ \boxed{\frac{1}{e}}
\frac{\pi^2}{6} ⇒ \boxed{\pi^2/6}
5\pi ⇒ \boxed{5\pi \text{ square inches}}
n! ⇒ \boxed{n!}
2^n - 1 ⇒ \boxed{2^{n}-1}
\frac{n(n+1)}{2} ⇒ \boxed{\frac{n^2+n}{2}}
\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix} ⇒ \boxed{\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix}}
\begin{pmatrix} 1 \\ 2 \end{pmatrix} ⇒ \boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}
i ⇒ \boxed{i}
3-4i ⇒ \boxed{-4i+3}
\text{A} ⇒ \boxed{A}
A ⇒ The correct choice is **A**.
A ⇒ Answer: (A) 12
\text{Alice} ⇒ \boxed{Alice}
\text{yes} ⇒ \boxed{\text{Yes}}
\text{increasing} ⇒ \boxed{\text{increasing}}
1,000,000 ⇒ \boxed{1{,}000{,}000}
1000000 ⇒ \boxed{10^6}
12.5\% ⇒ \boxed{12.5\%}
12.5 ⇒ \boxed{12.5\%}
\$32,\!348 ⇒ \boxed{32348}
6:30 ⇒ \boxed{6:30}
6:30 p.m. ⇒ \boxed{6:30 \text{ p.m.}}
105^\circ ⇒ \boxed{105^{\circ}}
105^\circ ⇒ \boxed{105}
\angle ABC ⇒ \boxed{\angle ABC}
10 \text{ or } 12 ⇒ \boxed{10 \text{ or } 12}
10, 12 ⇒ \boxed{10 \text{ or } 12}
-\frac{1}{2} ⇒ \boxed{\frac{-1}{2}}
-\frac{1}{2} ⇒ \boxed{-0.5}
\frac{2}{\sqrt{3}} ⇒ \boxed{\frac{2\sqrt{3}}{3}}
0 ⇒ \boxed{0}
\dfrac{7}{2} ⇒ \boxed{3\dfrac{1}{2}}
11\frac{1}{2} ⇒ \boxed{\frac{23}{2}}
\frac{3}{4} \text{ cup} ⇒ \boxed{\frac{3}{4}}
2.50 ⇒ \boxed{\$2.50}
\lfloor x \rfloor ⇒ \boxed{\lfloor x \rfloor}
x \equiv 3 \pmod{7} ⇒ \boxed{x \equiv 3 \pmod{7}}
\frac{4}{9}, \frac{5}{9} ⇒ \boxed{\frac{4}{9} \text{ and } \frac{5}{9}}
k > \frac{1}{4} ⇒ \boxed{k > 0.25}
m \le -3 ⇒ \boxed{m \leq -3}
a = 2, b = 3 ⇒ \boxed{a=2, b=3}
a = 2, b = 3 ⇒ \boxed{(a, b) = (2, 3)}
"""
WRONG = r"""
a + b ⇒ \boxed{b}
a = 5 ⇒ \boxed{b = 5}
A, B ⇒ \boxed{B}
-b ⇒ \boxed{a-b}
11a+c ⇒ \boxed{7 = 11a+c}
11a+c ⇒ 7 = 11a+c
2 ⇒ $\boxed{2} \quad \text{or} \quad \boxed{3}$
3 ⇒ $\boxed{2} \quad \text{or} \quad \boxed{3}$
3 ⇒ $\boxed{2}$ or maybe it is $\boxed{3}$
7 ⇒ <think>\boxed{7}</think>The result is \boxed{42}
7 ⇒ <think>\boxed{7}</think>
7 ⇒ <think>\boxed{7}
7 ⇒ <think>the answer is 7
7 ⇒ <think>7</think> I do not know.
7 ⇒ \boxed{7}</think> 8
b ⇒ \boxed{a b}
5 ⇒ \boxed{a5}
x + h ⇒ x
3 ⇒ 3 + h
5 ⇒ \boxed{2 + 3 g}
ab ⇒ \boxed{b}
a - b ⇒ \boxed{b - a}
A ⇒ \boxed{A, B}
B ⇒ \boxed{A \text{ or } B}
B ⇒ The answer is A.
a ⇒ A
x=y=3 ⇒ x=3
5 ⇒ \boxed{5} or \boxed{6}
5 ⇒ <answer>5</answer> or <answer>6</answer>
5 ⇒ <answer>5 or 6</answer>
5 ⇒ #### 5 or 6
A + B ⇒ \boxed{A \cup B}
A \cup B ⇒ \boxed{A \cap B}
A \cup B ⇒ \boxed{a \cup b}
x' ⇒ x
\frac{1}{2} ⇒ \boxed{2}
3 ⇒ \boxed{x = 3, 4}
5 ⇒ \boxed{\sqrt{5}}
\frac{3}{4} ⇒ \boxed{\frac{4}{3}}
[1,2] ⇒ \boxed{(1,2)}
1,2 ⇒ \boxed{1}
1 \pm \sqrt{19} ⇒ \boxed{1 + \sqrt{19}}
x+1 ⇒ \boxed{x-1}
y = 2x ⇒ \boxed{y = x}
\text{(A)} ⇒ \boxed{(B)}
3:5 ⇒ \boxed{5:3}
10:30 ⇒ \boxed{10}
\begin{pmatrix}1\\2\end{pmatrix} ⇒ \boxed{\begin{pmatrix}1&2\end{pmatrix}}
x>3 ⇒ \boxed{x<3}
3 ⇒ \boxed{x>3}
0.5 ⇒ \boxed{5}
25 ⇒ \boxed{0.2}
12 ⇒ \boxed{1.2}
1/3 ⇒ \boxed{0.3}
sqrt(2) ⇒ \boxed{1.41}
i ⇒ \boxed{-i}
2^5 ⇒ \boxed{2^6}
\sin x ⇒ \boxed{\cos x}
x_1 ⇒ \boxed{x_2}
ab ⇒ \boxed{a}
\mathbb{R} ⇒ \boxed{\mathbb{Z}}
0 ⇒ \boxed{\emptyset}
\overline{AB} ⇒ \boxed{\overline{CD}}
\infty ⇒ \boxed{0}
72 ⇒ 72 - 2 = 70
72 ⇒ The answer is 72 or 24.
72 ⇒ #### 24⏎
72 ⇒ \boxed{24} not 72
72 ⇒ Answer: I can't say; 72 is wrong
18 ⇒ 9 and 18
18 ⇒ about 9, maybe 18
18 ⇒ 18 19 20
18 ⇒ Answer: 17, 18, 19
18 ⇒ \boxed{17}, \boxed{18}
18 ⇒ <answer>17</answer><answer>18</answer>
18 ⇒ \boxed{17/18}
18 ⇒ \boxed{\text{18 or 19}}
18 ⇒ \boxed{18 \lor 19}
18 ⇒ \boxed{18; 19}
18 ⇒ \boxed{18 \\ 19}
18 ⇒ \boxed{answer}
x ⇒ \boxed{\text{answer}}
18 ⇒ <answer>\boxed{}</answer> 18
18 ⇒ #### ⏎
18 ⇒ \boxed18}
204 ⇒ Answer: 205
204 ⇒ Answer: 20.4
204 ⇒ Answer: \frac{204}{5}
204 ⇒ Answer: 204 + 1
33 ⇒ \boxed{0.33}
33 ⇒ \boxed{330}
5 ⇒ <think>\boxed{5}</think>⏎I think it is \boxed{6}.
5 ⇒ <answer>6</answer> <think> \boxed{5}
5 ⇒ \boxed{5}. Hmm, no. The answer is 7.
5 ⇒ \boxed{5} Wait: \boxed{7}
50 ⇒ \boxed{50x}
5 ⇒ \boxed{5^\circ F + 3}
x ⇒ \boxed{x + 0.001}
2x+3 ⇒ \boxed{y = 2x+4}
5 ⇒ \boxed{x \le 5}
5 ⇒ x = 5 or x = 6, so \boxed{x = 5 \text{ or } x = 6}
5 ⇒ The answer might be 5. Or perhaps the answer is 6.
5 ⇒ Either \boxed{5}, or else \boxed{6}.
5 ⇒ \boxed{5}\boxed{6}
6 ⇒ \boxed{5}⏎\boxed{6}
5 ⇒ <answer>5</answer>⏎<answer>6</answer>
6 ⇒ #### 5⏎#### 6
5 ⇒ \boxed{\{5,6\}}
5 ⇒ \boxed{5 \le x \le 6}
5 ⇒ \boxed{5 \text{ if } x > 0, 6 \text{ otherwise}}
5 ⇒ \boxed{5 = 6}
6 ⇒ \boxed{5 \neq 6}
5 ⇒ \boxed{\lnot 5}
5 ⇒ \boxed{5 \to 6}
5 ⇒ \boxed{5 \mid 10}
5 ⇒ \boxed{5_{6}}
5 ⇒ \boxed{\bar 5}
5 ⇒ \boxed{5\overline{5}}
5 ⇒ \boxed{5\prime}
5 ⇒ \boxed{5...}
5 ⇒ \boxed{> 5}
5 ⇒ \boxed{5+}
5 ⇒ \boxed{5\sqrt{}}
5 ⇒ \boxed{\hphantom{5}6}
x ⇒ \boxed{x, y}
x ⇒ \boxed{x'}
x ⇒ \boxed{\vec x}
x ⇒ \boxed{X}
\alpha ⇒ \boxed{a}
AB ⇒ \boxed{BA}
5 ⇒ \boxed{5m}
5 m ⇒ \boxed{5 m^2}
x = 2, y = 3 ⇒ \boxed{x = 3, y = 2}
p+q=9 ⇒ p+q = 8
9 ⇒ \boxed{9p=1}
5 ⇒ Answer: 4⏎5
5 ⇒ 4 is right, 5 isn't
5 ⇒ It's not 5
5 ⇒ 5? No.
5 ⇒ 5 or not 5
12 ⇒ The answer is 12 or so I think, maybe 13.
12 ⇒ 12 is not the answer.
12 ⇒ x = 12y
12 ⇒ 12/5
12 ⇒ 12.5
12 ⇒ $12x$
12 ⇒ 12%5
12 ⇒ 120
12 ⇒ 12^2
12 ⇒ 12,000
12 ⇒ 12 million
12 ⇒ 12:30
12 ⇒ 12 to 13
12 ⇒ x ≥ 12
12 ⇒ ≈ 12.3
12 ⇒ 12_13
12 ⇒ 12, 13
12 ⇒ {12, 13}
12 ⇒ [12, 13]
12 ⇒ either 12 or 13
12 ⇒ \frac{12}{0}
12 ⇒ 13 = 12
12 ⇒ 12 = x + 1
12 ⇒ x^2 = 12
12 ⇒ I guess 12?? or 11
x^2+1 ⇒ \boxed{x^2+1=0}
(2,3) ⇒ \boxed{(2,3,4)}
2, 3 ⇒ \boxed{2}
2, 3 ⇒ \boxed{2, 4}
2,3 ⇒ x = 2
500 ⇒ $5,00
3 people ⇒ \boxed{3 dogs}
45^\circ ⇒ \boxed{45 \text{ radians}}
6:00 ⇒ \boxed{6}
B ⇒ A or B
B ⇒ Not B
B ⇒ \boxed{A}
B ⇒ \boxed{b = 3}
A ⇒ A good question.
yes ⇒ The answer is no, yes would be wrong.
Tuesday ⇒ Not Tuesday
Tuesday ⇒ \boxed{Monday, Tuesday}
\sin x ⇒ \boxed{\sin y}
x \leq 3 ⇒ \boxed{x < 3}
1 \le x \le 2 ⇒ \boxed{1 \le x < 2}
x \neq 1 ⇒ \boxed{x = 1}
k(k+1) ⇒ \boxed{k(k-1)}
i ⇒ \boxed{\sqrt{1}}
\pm 2 ⇒ \boxed{2}
\sqrt{2} ⇒ \boxed{1.4142}
\frac{22}{7} ⇒ \boxed{\pi}
1e6 ⇒ \boxed{1e5}
2^{100} ⇒ \boxed{2^{101}}
12 ⇒ I do not think that it is 12.
12 ⇒ The answer is close to 12 but not equal.
12 ⇒ The answer is the negative of 12.
12 ⇒ The answer is the inverse of 12.
12 ⇒ The answer is the sum of digits of 12.
12 ⇒ The answer: 12? No, 13.
13 ⇒ He has 12 apples and 13 pears.
12 ⇒ The answer is in problem 12.
12 ⇒ one of 12 cases
12 ⇒ The probability is 1 in 12.
5 ⇒ Assume x = 5.
5 ⇒ Let x = 5.
5 ⇒ Let $x = 5$.
12 ⇒ There is no solution with x = 12.
12 ⇒ It might be 12.
12 ⇒ She has 3 of the 12 apples.
2 ⇒ $x = 5$ because $1+1=2$
2 ⇒ The answer is $x = 5$ because $1+1=2$.
5 ⇒ 5 at most
5 ⇒ The answer is 5 at most.
5 ⇒ The reciprocal of 5
15 ⇒ 15 a
15 ⇒ \boxed{15 a}
1 < x < 2 ⇒ 1, 2
1, 2 ⇒ 1<x<2
1, 2 ⇒ \boxed{1<x<2}
5 ⇒ \boxed 5.5
5 ⇒ 5; or 6
7 ⇒ We get 5 if x is 6, otherwise 7.
5 ⇒ If it were 5, we would need more.
5 ⇒ If it were 5
5 ⇒ If the answer were 5, then it would fail.
5 ⇒ Suppose it is 5.
5 ⇒ -\boxed{5}
5 ⇒ $-\boxed{5}$
5 ⇒ $x = -\boxed{5}$
5 ⇒ \frac{1}{\boxed{5}}
5 ⇒ $\sqrt{\boxed{5}}$
5 ⇒ $2\cdot\boxed{5}$
5 ⇒ $\boxed{5}^2$
5 ⇒ $\boxed{5}x$
5 ⇒ $\boxed{5}\cdot 10^3$
5 ⇒ It is not \boxed{5}.
5 ⇒ The answer might be 5.
17 ⇒ The answer is unlikely to be 17.
17 ⇒ It would be wrong to say 17.
5 ⇒ x = 5 is extraneous.
5 ⇒ The answer is 5 more than 5.
5 ⇒ The answer is 5, so the total is 10.
x < -1 or x > 1 ⇒ x < -1 and x > 1
5 ⇒ 5 is too small
5 ⇒ 5 is less than the answer
5 ⇒ \boxed{5 \% }x
5 ⇒ The answer is 5 if n is even and 7 if n is odd.
x = 5 ⇒ So it is not $x = 5$
5 ⇒ 5 if x is 6, otherwise 7
5 ⇒ It is 5 but I am not sure.
5 ⇒ The answer is 5 as well as 6
12 ⇒ 12 is the wrong answer
5 ⇒ Is it 5?
5 ⇒ The answer is 5 (or 6).
5 ⇒ 5 (mod p)
5 ⇒ The answer is 5 times 5.
A ⇒ A number.
13 ⇒ It is neither 12 nor 13.
1, 2, 3 ⇒ $1, 2, 3, ...$
5 m ⇒ 5 ms
5 km ⇒ 5 km per hour
20% ⇒ 20 ℃
2 trillion ⇒ 2
1/23 ⇒ \boxed{\frac123}
1 + 10^{-9}i ⇒ 1.00000
34 ⇒ If x = 2 it is 34.
34 ⇒ It is 34 too many.
34 ⇒ \boxed{35} \\ \boxed{34}
5 ⇒ up to, but not including, 5
12 ⇒ For 12 days it rained.
34 ⇒ Answer: 43
34 ⇒ \boxed{34} or \boxed{43}
34 ⇒ \boxed{34}. Actually, \boxed{43}.
34 ⇒ 34 students remain out of 50, so the answer is 16.
34 ⇒ There are 34 girls and 12 boys.
34 ⇒ If there are 34 girls, then there are 12 boys.
34 ⇒ He has 34 of 50 points.
34 ⇒ 3 and 4
34 ⇒ \boxed{3}\boxed{4}
34 ⇒ \boxed{3,4}
34 ⇒ $x = 34y$
34 ⇒ \boxed{34x}
34 ⇒ \boxed{34 \text{ or more}}
34 ⇒ The answer is between 30 and 34.
34 ⇒ The answer is greater than 34.
34 ⇒ The answer is not 34
34 ⇒ Its 34 sides are equal.
34 ⇒ Every 34 days it comes again.
34 ⇒ In 34 days it comes again.
34 ⇒ After 34 days it ends.
34 ⇒ Let n = 34.
34 ⇒ 34?
34 ⇒ Could it be 34?
34 ⇒ 34 is too big.
34 ⇒ \boxed{?34}
34 ⇒ \boxed{34 \pm 1}
34 ⇒ \boxed{\frac{34}{1000}}
34 ⇒ \boxed{n \le 34}
34 ⇒ \boxed{34,000}
34 ⇒ \boxed{3.4}
34 ⇒ \boxed{34^{\circ} + x}
1/2 ⇒ \boxed{\frac{1}{2} \text{ or } \frac{1}{3}}
(1,3) ⇒ \boxed{[1,3]}
(1,3) ⇒ \boxed{1,3}
1,3 ⇒ \boxed{3}
\{1,3\} ⇒ \boxed{\{1\}}
x>2 ⇒ \boxed{x \ge 2}
x^2-5x+6 ⇒ \boxed{(x+2)(x-3)}
f(x)=x+1 ⇒ \boxed{f(x)=x-1}
A ⇒ The answer is B.
A ⇒ \boxed{AB}
A ⇒ A or B
\text{Alice} ⇒ \boxed{Alice or Bob}
\text{yes} ⇒ \boxed{\text{No}}
\text{yes} ⇒ yes and no
3-4i ⇒ \boxed{3+4i}
6:30 ⇒ \boxed{6:03}
105^\circ ⇒ \boxed{75}
a = 2, b = 3 ⇒ \boxed{a=3, b=2}
10 \text{ or } 12 ⇒ \boxed{10}
12 ⇒ The first 12 digits.
12 ⇒ The last 12 digits of it.
12 ⇒ We look at the other 12 students.
12 ⇒ All 12 of them.
12 ⇒ These 12 cases remain.
12 ⇒ Each of the 12 boys has one.
m+n ⇒ \boxed{m+n = 9}
m ⇒ \boxed{m+n = 9}
m+n=9 ⇒ \boxed{9}
n ⇒ \boxed{m+n = 9}
5 ⇒ \boxed{5 \approx 6}
6 ⇒ \boxed{5 \approx 6}
7.8 ⇒ \boxed{\frac{70}{9} \approx 7.78}
7.6 ⇒ \boxed{\frac{70}{9} \approx 7.6}
(2,-1) ⇒ \boxed{x = 2, y = 1}
(2,-1) ⇒ \boxed{x = -1, x = 2}
42 ⇒ The answer is (E) 24.
E ⇒ The answer is (D) 42.
k ⇒ \boxed{2k+1, k \in \mathbb{Z}}
x \in \mathbb{Z} ⇒ \boxed{x \in \mathbb{R}}
12 ⇒ Figure 12.
12 ⇒ It is 13. <|im_end|> 12
12 ⇒ <|im_end|>12
9 ⇒ \boxed{m+n = 9m}
9 ⇒ \boxed{9 = m+n+1}
9 ⇒ \boxed{m+n = 8}
9 ⇒ \boxed{m+n > 9}
9 ⇒ \boxed{m + n = 9 \text{ or } m + n = 10}
9 ⇒ \boxed{2m = 9}
9 ⇒ \boxed{x^2 = 9}
25 ⇒ Answer: 25, but this is not certain
25 ⇒ Answer: 2⏎5
25 ⇒ <answer>24</answer> The answer was 25.
25 ⇒ <think>25</think><answer>24</answer>
25 ⇒ \boxed{25}, no, \boxed{24}
25 ⇒ #### 25 or 24
25 ⇒ See page 25.
25 ⇒ In step 25.
25 ⇒ Equation 25 shows this.
1/4 ⇒ The probability is $\frac14$ or $\frac12$.
1/4 ⇒ \boxed{\frac14 \approx 0.3 \text{ or } 0.5}
\frac{3}{4} ⇒ \boxed{\frac{3}{4} = 0.7}
(2,-1) ⇒ \boxed{x=-1, y=2}
\{x | x > 2\} ⇒ \boxed{[2, \infty)}
2k+1 ⇒ \boxed{2k}
B ⇒ \boxed{\text{(C) } 12}
5.5 ⇒ \boxed{5 \cdot \frac{1}{2}}
3:5 ⇒ \boxed{3/4}
x^3 ⇒ \boxed{p(x) = x^2}
60^\circ ⇒ \boxed{\frac{\pi}{6}}
8\pi ⇒ \boxed{8}
8 ⇒ \boxed{8\pi}
0.1\overline{6} ⇒ \boxed{0.16}
\sqrt{3} ⇒ \sqrt{3}i
a+b ⇒ \boxed{a-b}
abc ⇒ \boxed{ab}
6 ⇒ \boxed{6x}
6 ⇒ \boxed{6 \text{ or more}}
6 ⇒ \boxed{\le 6}
6 ⇒ \boxed{\text{about half of } 6}
6 ⇒ \boxed{1, 2, 3, 4, 5, 6}
6 ⇒ 1, 2, 3, 4, 5, 6
6 ⇒ Page 6 of 10.
no ⇒ \boxed{\text{yes}}
\text{Saturday} ⇒ \boxed{Sunday}
\text{Evelyn} ⇒ \boxed{\text{Carla}}
"""

HOSTILE = [
    "{" * 100_000,
    r"\boxed{" * 15_000,
    r"\boxed{1} or " * 8_000,
    "$" * 100_000,
    r"\[ " * 30_000,
    "####" * 25_000,
    "####\n" * 20_000,
    "<answer>" * 12_000,
    "<think>" * 15_000,
    "the answer is " * 7_000,
    "the answer is not " * 6_000 + "6",
    " " * 100_000 + "x",
    "".join(map(chr, range(32))) * 3_000,
    "\ue000" * 100_000,
    "\\boxed{\u0666}",
    "\\boxed{6\x00}",
    "\\boxed{\ud800}",
    r"\boxed{9^{9^9}}",
    r"\boxed{9^{9^{9^{9^9}}}}",
    r"\boxed{((9!)!)!}",
    r"\boxed{1e99999999}",
    r"\boxed{" + r"\frac{1}{" * 100 + "6" + "}" * 100 + "}",
    r"\boxed{" + "(" * 400 + "7" + ")" * 400 + "}",
    r"\boxed{" + "1," * 499 + "1}",
    r"\boxed{" + r"\pm 1" * 150 + "}",
    r"\boxed{\frac{6}{0}}",
]


def pairs(table: str) -> list[list[str]]:
    lines = table.strip().splitlines()
    return [line.replace("⏎", "\n").split(" ⇒ ", 1) for line in lines]


@pytest.mark.parametrize(("answer", "completion"), pairs(RIGHT))
def test_a_right_answer_is_rewarded(answer: str, completion: str) -> None:
    assert numeric_match({"answer": answer}, completion) == 1.0


@pytest.mark.parametrize(("answer", "completion"), pairs(WRONG))
def test_no_wrong_answer_is_rewarded(answer: str, completion: str) -> None:
    assert numeric_match({"answer": answer}, completion) == 0.0


@pytest.mark.parametrize("completion", HOSTILE)
def test_a_hostile_completion_is_wrong_and_soon_read(completion: str) -> None:
    for answer in ("6", r"\sqrt{3}", "Monday"):
        assert numeric_match({"answer": answer}, completion) == 0.0


def test_golds_that_look_like_articles_can_be_read() -> None:
    check_answers([{"answer": answer} for answer in ("a^2 - b^2", "a/b", r"A \cup B", "a + b")])


def test_the_reading_of_math_verify_is_a_call_of_the_library() -> None:
    """Its verdicts are its own, also where the strict reading differs."""
    by_library = resolve(reference_of(NumericMatch("math_verify")))  # as in a reward process
    assert by_library({"answer": "1/2"}, "The answer is $0.5$.") == 1.0
    assert by_library({"answer": "1/2"}, "The answer is $0.6$.") == 0.0
    assert by_library({"answer": "$\\sqrt{"}, "1") == 0.0
    lenient = {"answer": "5"}, "The answer is not 5."
    assert (by_library(*lenient), numeric_match(*lenient)) == (1.0, 0.0)
    with pytest.raises(ValueError, match="lenient"):
        NumericMatch("lenient")
