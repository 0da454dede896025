"""Synthetic customer-support messages with known topic, article and urgency. Standard library only.

A message has one sentence on the topic, at most one on the urgency, and the phrases that people write around them. Topic,
article and urgency are the labels; `make_data` and `pretraining` ask different questions about them.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Article -> the nouns customers use for it.
ARTICLES = {
    "coffee machine": ("coffee machine", "espresso machine", "coffee maker"),
    "blender": ("blender", "hand blender", "smoothie maker"),
    "headset": ("headset", "wireless headset", "gaming headset"),
    "monitor": ("monitor", "computer screen", "24 inch display"),
    "office chair": ("office chair", "desk chair", "swivel chair"),
    "tent": ("tent", "camping tent", "two-person tent"),
    "backpack": ("backpack", "rucksack", "hiking pack"),
    "vacuum": ("vacuum cleaner", "robot vacuum", "cordless vacuum"),
    "lamp": ("desk lamp", "reading lamp", "bedside lamp"),
}
NOT_ELECTRIC = ("office chair", "tent", "backpack")
NO_ARTICLE = "none"

#: Topic -> sentences that say it. {item} is an article with its determiner, {noun} without, {device} an electric one.
TOPICS: dict[str, tuple[str, ...]] = {
    "late delivery": (
        "{item} was due on {day} and still hasn't arrived.",
        "I was promised {item} by {day}, and it is not here yet.",
        "Delivery of {item} has been pushed back {count} times now.",
        "It has been {count} weeks and I am still waiting for {item}.",
        "Do you know when {item} will finally get here? It should have come on {day}.",
        "The courier was supposed to bring {item} on {day}, but nobody came.",
        "{item} is {count} days overdue according to your delivery estimate.",
        "Your site said {count} days for {item}, and that was over a fortnight ago.",
    ),
    "lost parcel": (
        "The tracking for {item} hasn't moved since {day}.",
        "The courier says {item} was handed over on {day}, but I never received it.",
        "Tracking shows delivered, yet there is no parcel with {item} anywhere.",
        "I think the parcel with {item} got lost on the way.",
        "None of the neighbours have {item}, and the depot can't find it either.",
        "The carrier told me they have lost {item}.",
        "According to the tracking page {item} went to a town I have never lived in and disappeared.",
        "Somebody signed for {item} on {day}, but it certainly wasn't me.",
    ),
    "address change": (
        "Could you send {item} to my work address instead?",
        "I moved house; please ship {item} to the new address.",
        "I typed the wrong house number when I ordered {item}.",
        "Is it still possible to change where {item} gets delivered?",
        "Please have {item} dropped at a pickup point rather than my home.",
        "{item} is on its way to my old flat, can you redirect it?",
        "The postcode on the order for {item} is wrong, please correct it.",
        "I won't be home on {day}; can {item} go to my sister's place?",
    ),
    "damage": (
        "{item} arrived with a big crack down the side.",
        "The box was crushed and {item} inside is dented.",
        "When I unpacked {item} on {day}, one part was broken off.",
        "{item} came scratched all over.",
        "I opened the parcel and {item} was in pieces.",
        "{item} got here on {day}, but it is bent out of shape.",
        "Whoever packed {item} used no padding, and now it is chipped.",
        "The courier must have dropped {item}, it is smashed.",
    ),
    "wrong item": (
        "I ordered {item} in black and got a red one.",
        "You sent me the wrong model instead of {item}.",
        "There was somebody else's order in the box, not {item}.",
        "This isn't {item} from the photo, it's a different one.",
        "The label on the box says {noun}, but this is not the size I picked.",
        "I paid for {item} and received last year's version.",
        "Instead of {item} the parcel had {count} phone cases in it.",
        "{item} you delivered on {day} is not the one I chose.",
    ),
    "return": (
        "I would like to send {item} back, it isn't what I hoped for.",
        "How do I return {item}? I changed my mind.",
        "{item} doesn't suit me, can I get a return label?",
        "I want to give {item} back within the {count} week period.",
        "Please tell me how to send back {item}, I never opened it.",
        "{item} was a gift, but they already own one, so I want to return it.",
        "I no longer need {item} and would like my money back.",
        "Can I swap {item} for a smaller one?",
    ),
    "double charge": (
        "My card was charged twice for {item}.",
        "I see {count} payments of {amount} for one order of {item}.",
        "You took {amount} for {item} on {day} and the same again a day later.",
        "There is a second debit of {amount} for {item} on my statement.",
        "I paid for {item} once, but my bank shows {count} withdrawals.",
        "I was billed {amount} too much for {item}.",
        "Why was {amount} taken again for {item}?",
        "The price of {item} was {amount}, and you charged it {count} times.",
    ),
    "invoice": (
        "I need an invoice for {item} with our company name on it.",
        "Could you email me the receipt for {item}?",
        "The invoice for {item} is missing our VAT number.",
        "I can't find the bill for {item} anywhere.",
        "My accountant is asking for a proper invoice for {item}.",
        "Please send a copy of the receipt for {item} bought on {day}.",
        "There is a typo in my name on the invoice for {item}.",
        "For the warranty I need the purchase receipt of {item}.",
    ),
    "discount": (
        "My voucher didn't work when I paid for {item}.",
        "The {many} percent code was not applied to {item}.",
        "I forgot to enter my discount code when ordering {item}.",
        "{item} is {amount} cheaper now than on {day}, will you refund the difference?",
        "The sale price for {item} wasn't used at checkout.",
        "My gift card still shows {amount} although I used it for {item}.",
        "The newsletter promised {amount} off {item}, but I paid full price.",
        "Where do I type in the coupon for {item}?",
    ),
    "defect": (
        "{item} stopped working after {count} days.",
        "{device} won't switch on any more.",
        "{device} makes a rattling noise and then dies.",
        "Since {day} {device} keeps cutting out.",
        "{item} has a fault, one of the parts came loose by itself.",
        "After {count} weeks of use {item} simply gave up.",
        "{item} is broken again, same problem as last time.",
        "A seam or joint of {item} came apart on {day}.",
        "Something in {item} has failed, it worked fine until {day}.",
    ),
    "setup": (
        "How do I put {item} together? The manual is missing.",
        "I can't work out how to set up {item}.",
        "Is there a video that shows how to use {item}?",
        "What is the right way to clean {item}?",
        "The instructions for {item} are only in German.",
        "Which settings do you recommend for {item}?",
        "I have {count} parts left over after putting {item} together.",
        "Could somebody walk me through the first use of {item}?",
    ),
    "safety": (
        "{device} started to smoke on {day}.",
        "I got an electric shock from {device}.",
        "There is a burning smell coming from {device}.",
        "{device} gets so hot that it melted a bit.",
        "My son cut his hand on a sharp edge of {item}.",
        "Sparks came out of {device} when I touched it.",
        "{item} collapsed and I hurt my back.",
        "{item} gave my daughter a rash.",
        "I was injured by {item} on {day}.",
    ),
    "login": (
        "I can't log in to my account any more.",
        "The password reset email never arrives.",
        "Your site says my password is wrong, but I am sure it isn't.",
        "My account has been locked since {day}.",
        "I get an error each time I sign in.",
        "The code you text me to log in doesn't work.",
        "I am locked out after {count} attempts to sign in.",
        "I forgot which password I used and the reset link is dead.",
    ),
    "profile": (
        "Please delete my account and my data.",
        "I want to change the email address in my profile.",
        "Can you update the phone number on my account?",
        "How do I close my customer account?",
        "Please stop sending me the newsletter.",
        "I have {count} accounts by mistake, can you merge them?",
        "My surname changed, please correct it in my profile.",
        "What personal data do you store about me?",
    ),
    "stock": (
        "When will {item} be back in stock?",
        "Do you still have {item} in blue?",
        "Is {item} available in a larger size?",
        "Before I buy {item}: does it come with a spare part?",
        "I am thinking about buying {item}, how long is the guarantee?",
        "Will you get more of {item} before {day}?",
        "How heavy is {item}? The page doesn't say.",
        "Which is better for a beginner, {item} or the cheaper one?",
    ),
    "bulk order": (
        "We would like {many} of {item} for our company, can you make an offer?",
        "What would {item} cost if we took {many} pieces?",
        "Our school wants to buy {item} for {count} classrooms, is there a group price?",
        "Please quote {many} units of {item}.",
        "I run a small hotel and need {item} for {many} rooms.",
        "Is there a trade price for {item} when ordering {many} or more?",
        "We want to resell {item}, who can I talk to?",
        "Could you prepare an offer for {many} times {item}?",
    ),
}
TOPICS_WITHOUT_ARTICLE = ("login", "profile")
TOPICS_BEFORE_BUYING = ("stock", "bulk order", "rental", "instalments", "showroom")

#: Topics that only the pairs have: the fine-tune's rows never say where these go.
NEW_TOPICS: dict[str, tuple[str, ...]] = {
    "rental": ("Could I rent {item} for a weekend?", "Do you lend out {item}?", "What is the hire of {item} for {count} days?"),
    "recycling": (
        "Do you recycle {item} when it is worn out?",
        "Where can I scrap {item}?",
        "How do I dispose of {item} at the end of its life?",
    ),
    "insurance": (
        "Can I insure {item} against theft?",
        "I would like a theft policy for {item}.",
        "A burglar took {item}, what does the insurance pay?",
    ),
    "instalments": (
        "May I pay for {item} in {count} instalments?",
        "Can the cost of {item} be spread over {count} months?",
        "Do you offer credit for {item}?",
    ),
    "customs": (
        "Customs are holding {item} at the border.",
        "The import duty on {item} was {amount}.",
        "Which customs form does {item} need?",
    ),
    "gift wrapping": (
        "Could you wrap {item} as a gift?",
        "Please add a birthday card to {item}.",
        "I want {item} in gift paper.",
    ),
    "workshop": (
        "Is there a repair course for {item}?",
        "I would like to learn how to mend {item} myself.",
        "Do you run workshops about {item}?",
    ),
    "accessories": (
        "Which cover fits {item}?",
        "I need a matching bag for {item}.",
        "Are there accessories for {item}?",
    ),
    "review": (
        "My review of {item} was never published.",
        "I want to rate {item} with {count} stars.",
        "Please remove my comment about {item}.",
    ),
    "bonus points": (
        "I got no bonus points for {item}.",
        "How many points do I earn with {item}?",
        "My loyalty points for {item} are missing.",
    ),
    "showroom": (
        "Can I try {item} in one of your shops?",
        "Is {item} on display anywhere near me?",
        "I would like to see {item} in your showroom.",
    ),
    "packaging": (
        "There was far too much plastic around {item}.",
        "Can I bring the empty box of {item} to you?",
        "What shall I do with the foam from {item}?",
    ),
}  # fmt: skip

#: The customer's words about urgency; "usual" has none, or other words.
URGENCY: dict[str, tuple[str, ...]] = {
    "urgent": (
        "I need this solved today.",
        "Please hurry, I leave on {day}.",
        "This is urgent.",
        "It can't wait until next week.",
        "Please call me back right away.",
        "I need an answer within the hour.",
        "As soon as possible, please!",
        "We have guests tomorrow, so this is really pressing.",
        "I am running out of time here.",
    ),
    "usual": (
        "",
        "",
        "Could you look into it?",
        "What can we do about it?",
        "Please let me know how to proceed.",
        "I'd be glad to hear from you.",
        "What happens next?",
    ),
    "can wait": (
        "There is no rush.",
        "Take your time.",
        "Whenever you get round to it is fine.",
        "No hurry at all.",
        "It isn't urgent, I just wanted to ask.",
        "This can wait until you are less busy.",
        "Any time this month is fine.",
        "I don't mind waiting for an answer.",
    ),
}

GREETINGS = ("Hi,", "Hello,", "Hi there,", "Dear team,", "Good morning,", "Good evening,", "Hey,", "To whom it may concern,")
CLOSINGS = ("Thanks!", "Thank you.", "Best, {name}", "Regards, {name}", "Many thanks, {name}", "Cheers", "Kind regards, {name}")
ASIDES = (
    "My order number is {order}.",
    "Order {order}.",
    "This is about order {order}.",
    "I have been a customer for {count} years.",
    "I tried the chat first, but nobody answered.",
    "I already wrote to you on {day}.",
    "A friend recommended your shop.",
    "The rest of the order was fine.",
    "I looked through the help pages and found nothing.",
    "It's the first time I write to you.",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
COUNTS = ("two", "three", "four", "five", "six")
NAMES = (
    "Anna",
    "Ben",
    "Carla",
    "David",
    "Elena",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Keiko",
    "Liam",
    "Maya",
    "Omar",
    "Priya",
)


@dataclass(frozen=True)
class Message:
    """What a customer wrote, and the facts in it: keys of TOPICS and URGENCY, a key of ARTICLES or NO_ARTICLE."""

    text: str
    topic: str
    article: str
    urgency: str


def draw_message(rng: random.Random, topics: dict[str, tuple[str, ...]] = TOPICS) -> Message:
    """One message; each of the topics, and for it each article and urgency, is equally likely."""
    topic = rng.choice(list(topics))
    article = NO_ARTICLE if topic in TOPICS_WITHOUT_ARTICLE else rng.choice(list(ARTICLES))
    urgency = rng.choice(list(URGENCY))
    slots = _slots(rng, topic, article)
    templates = [text for text in topics[topic] if article not in NOT_ELECTRIC or "{device}" not in text]
    main_sentence = _sentence(_fill(rng.choice(templates), slots, rng))
    sentences = [main_sentence]
    if rng.random() < 0.4:
        sentences.insert(rng.choice((0, 1)), _fill(rng.choice(ASIDES), slots, rng))
    urgency_sentence = _fill(rng.choice(URGENCY[urgency]), slots, rng)
    if urgency_sentence:
        sentences.insert(len(sentences) if rng.random() < 0.8 else 0, urgency_sentence)
    if rng.random() < 0.5:
        sentences.insert(0, rng.choice(GREETINGS))
    if rng.random() < 0.4:
        sentences.append(_fill(rng.choice(CLOSINGS), slots, rng))
    return Message(_with_typing_style(" ".join(sentences), rng), topic, article, urgency)


def draw_messages(
    rng: random.Random, count: int, excluded: set[str], topics: dict[str, tuple[str, ...]] = TOPICS
) -> list[Message]:
    """`count` messages whose texts are not in `excluded`; adds them to it."""
    messages: list[Message] = []
    while len(messages) < count:
        message = draw_message(rng, topics)
        if message.text not in excluded:
            excluded.add(message.text)
            messages.append(message)
    return messages


def _slots(rng: random.Random, topic: str, article: str) -> dict[str, str]:
    noun = rng.choice(ARTICLES[article]) if article != NO_ARTICLE else ""
    determiner = "the" if topic in TOPICS_BEFORE_BUYING else rng.choice(("the", "the", "my", "the new"))
    return {"noun": noun, "item": f"{determiner} {noun}", "device": f"{determiner} {noun}"}


def _fill(template: str, slots: dict[str, str], rng: random.Random) -> str:
    numbers = {
        "amount": f"{rng.randint(12, 389)}.{rng.choice(('00', '50', '90', '99'))} euros",
        "order": rng.randint(10000, 99999),
        "many": rng.choice((10, 15, 20, 25, 30, 40, 50)),
    }
    return template.format(**slots, **numbers, day=rng.choice(DAYS), count=rng.choice(COUNTS), name=rng.choice(NAMES))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _with_typing_style(text: str, rng: random.Random) -> str:
    """Some people don't use capitals, some don't use apostrophes."""
    style = rng.random()
    if style < 0.08:
        return text.lower()
    return text.replace("'", "") if style < 0.14 else text
