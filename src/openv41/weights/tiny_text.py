"""The text that the small model's vocabulary is trained on: written for it, and fixed so that its ids stay."""

TEXT = """
The harbour lay quiet in the early morning. A fisherman untied his boat, looked at the sky and said that the wind would
turn before noon. His daughter did not believe him; she had read the forecast, and the forecast promised sunshine for
the whole week. "Forecasts are written by people who sit indoors," he answered. The boat moved slowly past the old
lighthouse. THE LIGHTHOUSE had not been lit for twenty years, but the keeper still climbed its stairs every evening.

What is a language model? It is a program that reads some text and says how likely each possible next word is. It does
not look words up in a table: it computes them, layer after layer, from numbers that were learned by reading a great
deal of text. What is a token? A token is a piece of a word. Short words are one token, long words are several tokens.
What is attention? Attention lets a position look back at earlier positions and take from them what it needs. A window
shows the last few tokens; everything further away is compressed, and only the most useful parts are picked.

User: Can you explain why the sky is blue?
Assistant: Sunlight holds all colours. Air scatters blue light more strongly than red light, so blue reaches your eyes
from every direction. At sunset the light travels through more air, most of the blue is lost, and the sky turns red.
User: Thank you! And why is the sea blue?
Assistant: Partly because it mirrors the sky, partly because water absorbs red light. Deep water therefore looks blue.
User: Write a short poem about winter.
Assistant: Snow on the roof, smoke in the air, nobody walking anywhere. A candle burns behind the glass; the longest
night will also pass.

def count_words(text):
    words = {}
    for word in text.lower().split():
        words[word] = words.get(word, 0) + 1
    return sorted(words.items(), key=lambda item: item[1], reverse=True)

class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def distance(self, other):
        return ((self.x - other.x) ** 2 + (self.y - other.y) ** 2) ** 0.5

import math
for number in range(1, 100):
    if number % 15 == 0: print("fizzbuzz")
    elif number % 5 == 0: print("buzz")
    elif number % 3 == 0: print("fizz")
    else: print(number)

{"name": "weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}, "result": [12.5, 14.0, 9.75]}
<table><tr><td>1</td><td>one</td></tr><tr><td>2</td><td>two</td></tr></table>

One plus one is two; two plus three is five; seven times eight is fifty-six. 7 * 8 = 56, 12 * 12 = 144, 100 / 4 = 25.
In 1969 people first walked on the Moon. The Earth is about 150 million kilometres from the Sun. Light needs roughly
500 seconds for that way. Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday. January, February, March,
April, May, June, July, August, September, October, November, December.

The first rule of good writing is to know what you want to say. The second rule is to say it and then to stop. Where
a short word will do, a long word is in the way. Read your sentence aloud: if you run out of breath, so will the reader.

Der Fischer sagte, dass der Wind sich drehen wuerde. Die Tür war offen, das Mädchen hörte die Möwen über dem Wasser.
Le café était fermé, mais la fenêtre de l'hôtel laissait voir le garçon et son élève. Où êtes-vous allés, Hélène?
El niño soñaba con montañas lejanas. ¿Qué hora es? Mañana iremos a la playa. Até amanhã, João, e obrigado pela lição.
Η θάλασσα ήταν ήσυχη και ο ουρανός γαλανός. Море было тихим, а небо синим. 海很安静，天空很蓝。今日は海が静かです。
바다는 고요하고 하늘은 푸르다. Naïve façade, CAFÉ, ÉLÈVE, ﬁne ﬂow, ½ litre, 10 km², ①②③, Ｗｉｄｅ letters. 🙂🚀🌊

There was once a clockmaker who built a clock that told the truth. People came from far away to ask it questions. It
answered each of them with the time, because that was the only truth it knew. Some went home angry; some went home and
thought about it. The clockmaker himself never asked. He wound the clock every night, listened to it for a while, and
went to bed. Years later, somebody found his notes. On the last page he had written: a machine should do one thing, it
should do that thing well, and it should say plainly when it cannot.
"""
